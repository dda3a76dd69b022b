-- Ends a request; again is harmless.
-- KEYS: OPEN, LEASES. ARGV: lease, used tokens (-1: the engine never saw it).
settle(KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2]))
return 1
