-- Reserves all demands of a request, or nothing. Without demands it only notes the output tokens of an open one.
-- KEYS: OPEN, LEASES, hash of the tenant, hash of the key.
-- ARGV: now (0: the server's clock), lease, its life, output tokens, time per output token; then for each demand
--   the number of its hash in KEYS, kind, limit, amount, 1 if it is enforced.
-- Returns for each demand: 1 if it is over, wait, remaining, reset (see Answer in auth/limits.py).

local open, leases = KEYS[1], KEYS[2]
local now, lease, life = time_now(ARGV[1]), ARGV[2], tonumber(ARGV[3])
local output_tokens, pace = tonumber(ARGV[4]), tonumber(ARGV[5])

-- Requests of workers that died: their places and tokens come back.
for _, dead in ipairs(redis.call('ZRANGEBYSCORE', open, '-inf', text(now), 'LIMIT', 0, 1000)) do
  settle(open, leases, dead, 0)
end

local function window_wait(scope, kind, width, sum, oldest, next, limit, amount)
  if amount > limit then return -1 end
  for number = oldest, next - 1 do
    local _, last, size = entry(redis.call('HGET', scope, kind .. ':' .. text(number)))
    sum = sum - size
    if sum + amount <= limit then return last + width - now end
  end
  return -1
end

local function parallel_wait(scope)
  local wait = MAX_PARALLEL_WAIT
  local known = false
  for _, packed in ipairs(redis.call('HVALS', leases)) do
    local other = cmsgpack.unpack(packed)
    for _, held in ipairs(other[3]) do
      if held[1] == scope and held[2] == 'pr' and other[2] > 0 then
        known, wait = true, math.min(wait, other[1] + other[2] * pace - now)
      end
    end
  end
  return known and math.max(wait, SECOND) or SECOND
end

local demands, refused = {}, false
for at = 6, #ARGV, 5 do
  local d = {
    scope = KEYS[tonumber(ARGV[at])], kind = ARGV[at + 1], limit = tonumber(ARGV[at + 2]),
    amount = tonumber(ARGV[at + 3]), wait = 0, reset = 0, number = 0,
  }
  local spec = KINDS[d.kind]
  d.spec = spec
  if spec.window then
    d.sum, d.oldest, d.next = window(d.scope, d.kind, spec.window, now)
  elseif spec.period then
    local found = redis.call('HMGET', d.scope, d.kind .. ':n', d.kind .. ':p')
    d.number, d.ends = period(spec.period, now)
    d.sum = tonumber(found[2]) == d.number and tonumber(found[1]) or 0
  else
    d.sum = tonumber(redis.call('HGET', d.scope, d.kind .. ':n')) or 0
  end
  d.over = d.sum + d.amount > d.limit
  if d.over then
    if spec.window then
      d.wait = window_wait(d.scope, d.kind, spec.window, d.sum, d.oldest, d.next, d.limit, d.amount)
    elseif spec.period then
      d.wait = d.amount > d.limit and -1 or d.ends - now
    else
      d.wait = parallel_wait(d.scope)
    end
    if ARGV[at + 4] == '1' then refused = true end
  end
  demands[#demands + 1] = d
end

local function take_window(d)
  local field = d.kind .. ':' .. text(d.next - 1)
  d.number = d.next
  if d.next - d.oldest >= EXACT_ENTRIES then
    local first, _, size = entry(redis.call('HGET', d.scope, field))
    if now - first < math.floor(d.spec.window / WINDOW_SHARES) then
      d.number = d.next - 1
      redis.call('HSET', d.scope, field, text(first) .. ':' .. text(now) .. ':' .. text(size + d.amount),
        d.kind .. ':n', text(d.sum))
      return
    end
  end
  d.next = d.next + 1
  redis.call('HSET', d.scope, d.kind .. ':' .. text(d.number), text(now) .. ':' .. text(now) .. ':' .. text(d.amount),
    d.kind .. ':n', text(d.sum), d.kind .. ':h', text(d.oldest), d.kind .. ':t', text(d.next))
end

local packed = redis.call('HGET', leases, lease)
if not refused and (packed or #demands > 0) then
  local record = packed and cmsgpack.unpack(packed) or {now, 0, {}}
  record[2] = output_tokens
  for _, d in ipairs(demands) do
    d.sum = d.sum + d.amount
    if d.spec.window then
      take_window(d)
    elseif d.spec.period then
      redis.call('HSET', d.scope, d.kind .. ':n', text(d.sum), d.kind .. ':p', text(d.number))
    else
      redis.call('HSET', d.scope, d.kind .. ':n', text(d.sum))
    end
    table.insert(record[3], {d.scope, d.kind, d.amount, d.number})
  end
  redis.call('HSET', leases, lease, cmsgpack.pack(record))
  redis.call('ZADD', open, text(now + life), lease)
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, KEEP_MS) end
end

local function reset(d)
  if d.spec.period then return d.sum > 0 and d.ends - now or 0 end
  if not d.spec.window or d.sum <= 0 then return 0 end
  local _, last = entry(redis.call('HGET', d.scope, d.kind .. ':' .. text(d.next - 1)))
  return last + d.spec.window - now
end

local result = {}
for _, d in ipairs(demands) do
  result[#result + 1] = d.over and 1 or 0
  result[#result + 1] = d.wait
  result[#result + 1] = math.max(0, d.limit - d.sum)
  result[#result + 1] = reset(d)
end
return result
