-- What the scripts share; put before each of them (auth/limits_redis.py). All times are microseconds since 1970.
--
-- The counts of one scope (a tenant, a key) are one hash. Of each kind of limit K it has
--   a window:           K:n sum, K:h number of the oldest entry, K:t of the next one, K:<number> "first:last:amount"
--   a day or month:     K:n tokens, K:p the period's number
--   parallel requests:  K:n places taken
-- The requests of a tenant that are open: LEASES, a hash of packed {started, output_tokens, held}, where held is a
-- list of {scope's hash, K, amount, number of the entry or period}; and OPEN, a sorted set of when each one expires.

local SECOND, DAY = 1e6, 86400e6
local KINDS = {
  rs = {unit = 'requests', window = SECOND},
  rm = {unit = 'requests', window = 60 * SECOND},
  tm = {unit = 'tokens', window = 60 * SECOND},
  pr = {unit = 'parallel'},
  td = {unit = 'tokens', period = 'day'},
  tM = {unit = 'tokens', period = 'month'},
}
-- As in auth/limits.py.
local EXACT_ENTRIES, WINDOW_SHARES, MAX_PARALLEL_WAIT = 256, 64, 30 * SECOND
local KEEP_MS = 40 * 86400 * 1000 -- longer than a month

local function text(number) return string.format('%.0f', number) end

local function time_now(given)
  if given ~= '0' then return tonumber(given) end
  local now = redis.call('TIME')
  return tonumber(now[1]) * SECOND + tonumber(now[2])
end

local function entry(value)
  local first, last, amount = string.match(value, '^(%d+):(%d+):(-?%d+)$')
  return tonumber(first), tonumber(last), tonumber(amount)
end

-- The window of a kind without what has grown too old: sum, number of the oldest entry, of the next one.
local function window(scope, kind, width, now)
  local found = redis.call('HMGET', scope, kind .. ':n', kind .. ':h', kind .. ':t')
  -- A forgotten scope starts where no number was before: an old lease must not meet a new entry.
  local start = math.floor(now / 1000)
  local sum, oldest, next = tonumber(found[1]) or 0, tonumber(found[2]) or start, tonumber(found[3]) or start
  local before = oldest
  while oldest < next do
    local _, last, amount = entry(redis.call('HGET', scope, kind .. ':' .. text(oldest)))
    if last + width > now then break end
    redis.call('HDEL', scope, kind .. ':' .. text(oldest))
    sum, oldest = sum - amount, oldest + 1
  end
  if oldest ~= before then redis.call('HSET', scope, kind .. ':n', text(sum), kind .. ':h', text(oldest)) end
  return sum, oldest, next
end

-- Number of the period that `now` is in, and its end.
local function period(name, now)
  local day = math.floor(now / DAY)
  if name == 'day' then return day, (day + 1) * DAY end
  -- Days to civil dates: H. Hinnant, "chrono-Compatible Low-Level Date Algorithms".
  local function days(year, month)
    if month <= 2 then year = year - 1 end
    local era = math.floor(year / 400)
    local of_era = year - era * 400
    local of_year = math.floor((153 * (month + (month > 2 and -3 or 9)) + 2) / 5)
    return era * 146097 + of_era * 365 + math.floor(of_era / 4) - math.floor(of_era / 100) + of_year - 719468
  end
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local of_era = shifted - era * 146097
  local of_year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
    - math.floor(of_era / 146096)) / 365)
  local in_year = of_era - (365 * of_year + math.floor(of_year / 4) - math.floor(of_year / 100))
  local march = math.floor((5 * in_year + 2) / 153)
  local month = march + (march < 10 and 3 or -9)
  local year = of_year + era * 400 + (month <= 2 and 1 or 0)
  local following_year, following = year, month + 1
  if following == 13 then following_year, following = year + 1, 1 end
  return year * 12 + month - 1, days(following_year, following) * DAY
end

-- Ends a request. used: tokens; -1: the engine never saw it, so that it counts nowhere.
local function settle(open, leases, lease, used)
  local packed = redis.call('HGET', leases, lease)
  if not packed then return end
  redis.call('HDEL', leases, lease)
  redis.call('ZREM', open, lease)
  for _, held in ipairs(cmsgpack.unpack(packed)[3]) do
    local scope, kind, amount, number = held[1], held[2], held[3], held[4]
    local spec = KINDS[kind]
    local kept = 0
    if used >= 0 and spec.unit == 'tokens' then kept = used end
    if used >= 0 and spec.unit == 'requests' then kept = amount end
    if spec.unit == 'parallel' then
      if redis.call('HINCRBY', scope, kind .. ':n', -1) < 0 then redis.call('HSET', scope, kind .. ':n', '0') end
    elseif kept == amount then
      -- Nothing to give back.
    elseif spec.window then
      local field = kind .. ':' .. text(number)
      local value = redis.call('HGET', scope, field)
      if value then
        local first, last, size = entry(value)
        redis.call('HSET', scope, field, text(first) .. ':' .. text(last) .. ':' .. text(size - amount + kept))
        redis.call('HINCRBY', scope, kind .. ':n', text(kept - amount))
      end
    elseif tonumber(redis.call('HGET', scope, kind .. ':p')) == number then
      redis.call('HINCRBY', scope, kind .. ':n', text(kept - amount))
    end
  end
end
