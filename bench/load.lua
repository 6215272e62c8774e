-- Sends prepared bodies in turn; prints what it saw as one line of JSON.
-- Arguments: folder of bodies, their number, mean pause of a connection in ms (0: none).
local requests, turn, mean = {}, 0, 0

function init(args)
   for number = 0, tonumber(args[2]) - 1 do
      local file = assert(io.open(args[1] .. "/" .. number, "rb"))
      local headers = { ["Content-Type"] = "application/json" }
      requests[#requests + 1] =
         wrk.format("POST", "/v1/chat/completions", headers, file:read("*a"))
      file:close()
   end
   mean = tonumber(args[3])
   if mean == 0 then delay = nil end
end

function request()
   turn = turn % #requests + 1
   return requests[turn]
end

function delay()
   return math.random(0, 2 * mean)
end

function done(summary, latency)
   local errors = summary.errors
   io.write(string.format(
      '{"requests": %d, "duration_us": %d, "failed": %d, "p50_us": %d, "p95_us": %d, "p99_us": %d}\n',
      summary.requests, summary.duration,
      errors.connect + errors.read + errors.write + errors.status + errors.timeout,
      latency:percentile(50), latency:percentile(95), latency:percentile(99)))
end
