-- Keeps the requests of a tenant that are still open from expiring.
-- KEYS: OPEN. ARGV: now (0: the server's clock), life of a lease, leases.
local expires = text(time_now(ARGV[1]) + tonumber(ARGV[2]))
for at = 3, #ARGV do redis.call('ZADD', KEYS[1], 'XX', expires, ARGV[at]) end
return 1
