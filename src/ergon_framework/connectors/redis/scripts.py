"""Lua scripts: every change that must be one step of the server.

A claim is a worker's exclusive right to process a message. An entry of the group's pending list is a claim. Its count
grows with every claim, by any consumer, and is never decreased, so that consumer and count together identify one claim.
Uncounted deliveries are counted separately, in a hash, *free*. A deferred message waits in the stream *later*, and the
sorted set *due* has its due time (see ``redis.messages.QueueKeys``). A released entry belongs to a consumer that does
not exist, keeps its place in the stream, and is claimed first.

A message that moves from one stream to another is added to the second before it is deleted from the first: a message
that the server rejects, for lack of memory for instance, stays where it was.

Waiting workers block on the stream itself and on the stream *bell*. An entry that becomes available without being added
to the stream, because it was released or its due time comes earlier, is announced by an entry in *bell* (``rings``). A
message with too many fields for one command is packed into one field (``packed``, ``spread``).
"""

from __future__ import annotations

from typing import Final

from ergon_framework.connectors.redis.connection import Script

#: The consumer that owns released entries.
RETURNED_CONSUMER: Final = "ergon:returned"
#: Maximum number of due messages that one fetch makes ready.
MAX_DUE_PER_FETCH: Final = 200
#: Maximum number of fields and values of a message; Lua passes only about 8,000 arguments to one command.
MAX_FIELDS: Final = 7_000
#: The field that holds all others of a message with more of them, each text prefixed by its length.
PACKED_FIELD: Final = "ergon-packed"

#: Functions that several scripts use.
_HELPERS: Final = f"""
local RETURNED, MOST, PACKED = '{RETURNED_CONSUMER}', {MAX_FIELDS}, '{PACKED_FIELD}'

local function milliseconds()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- The fields of an entry, also where they are packed; an invalid packing is returned unchanged.
local function spread(fields)
    if fields[1] ~= PACKED then return fields end
    local texts, whole, at = {{}}, fields[2], 1
    while at <= #whole do
        local length, from = string.match(whole, '^(%d+):()', at)
        if not length or #length > 9 or from + length - 1 > #whole then return fields end
        texts[#texts + 1] = string.sub(whole, from, from + length - 1)
        at = from + length
    end
    if #texts == 0 or #texts % 2 == 1 then return fields end
    for rest = 3, #fields do texts[#texts + 1] = fields[rest] end
    return texts
end

-- The fields of a message as one command takes them.
local function packed(fields)
    if #fields <= MOST then return fields end
    local texts = {{}}
    for at, text in ipairs(fields) do texts[at] = #text .. ':' .. text end
    return {{PACKED, table.concat(texts)}}
end

-- The fields of an entry without those that *drop* names or that describe a dead letter.
local function without(fields, drop)
    local kept = {{}}
    fields = spread(fields)
    for at = 1, #fields, 2 do
        local name = fields[at]
        if not drop[name] and string.sub(name, 1, 11) ~= 'ergon-dead-' then
            kept[#kept + 1] = name
            kept[#kept + 1] = fields[at + 1]
        end
    end
    return kept
end

-- Whether *answer* says that the memory limit of the server is reached.
local function is_out_of_memory(answer)
    return type(answer) == 'table' and answer.err ~= nil and string.find(answer.err, 'OOM', 1, true) ~= nil
end

-- Adds an entry; nil where the server rejects it.
local memory_full = false
local function added(stream, fields)
    if #fields > MOST + 100 or #fields == 0 then return nil end
    local id = redis.pcall('XADD', stream, '*', unpack(fields))
    memory_full = memory_full or is_out_of_memory(id)
    if type(id) == 'table' then return nil end
    return id
end

-- The letter of a settlement that the server has rejected.
local function refused()
    return memory_full and 'm' or 'f'
end

local function rings(bell)
    redis.pcall('XADD', bell, 'MAXLEN', '1', '*', 'rung', '1')
end
"""

#: Maximum bytes of the other fields that are returned of a message without its body.
_MAX_SHOWN_BYTES: Final = 512 * 1024

#: Sizes of entries. Of an entry that is too large to be loaded the body is left out, and as many of its other fields
#: are kept as are needed to identify it.
_MEASURE: Final = f"""
local TOLD = {_MAX_SHOWN_BYTES}

-- Bytes of the body, or of all fields where none is the body or they are more; bytes of all; deliveries counted before.
local function measure(fields, body)
    local size, total, delivered = nil, 0, 0
    for at = 1, #fields, 2 do
        local name, value = fields[at], fields[at + 1]
        total = total + #name + #value
        if name == body then
            size = #value
        elseif name == 'ergon-deliveries' and #value < 10 and string.match(value, '^%d+$') then
            delivered = tonumber(value)
        end
    end
    if size == nil then size = total end
    return math.max(size, total - size), total, delivered
end

local function without_body(fields, body)
    local kept, total = {{}}, 0
    for at = 1, #fields, 2 do
        local name, value = fields[at], fields[at + 1]
        if name ~= body and total + #name + #value <= TOLD then
            total = total + #name + #value
            kept[#kept + 1] = name
            kept[#kept + 1] = value
        end
    end
    return kept
end

-- How many entries to read next: few as long as they are large, because all of them are copied here.
local function next_step(step, heaviest, budget)
    if heaviest * step * 4 > budget then return 1 end
    return math.min(step * 4, 256)
end
"""

#: Claims for one fetch, up to its number of bytes. A redelivered message may be what ended the worker: it is claimed
#: alone, and without its body once it has had its last delivery.
_TAKE: Final = (
    _MEASURE
    + """
local stream, free = KEYS[1], KEYS[2]
local group, me, want, body = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local largest, budget, last_delivery = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local taken, bytes, heaviest, full = {}, 0, 0, want < 1

-- Takes a claimed entry, or releases it uncounted: then nothing more fits.
local function take(entry, times, freed)
    local fields = spread(entry[2])
    local size, total, delivered = measure(fields, body)
    local deliveries = delivered + times - freed
    local unread = size > largest or deliveries > last_delivery
    local weight = unread and 0 or total
    heaviest = math.max(heaviest, total)
    if full or (#taken > 0 and (deliveries > 1 or bytes + weight > budget)) then
        redis.call('XCLAIM', stream, group, RETURNED, 0, entry[1], 'JUSTID')
        redis.call('HINCRBY', free, entry[1], 1)
        full = true
        return
    end
    taken[#taken + 1] = {
        entry[1], unread and without_body(fields, body) or entry[2], times, freed, unread and size or -1
    }
    bytes = bytes + weight
    full = deliveries > 1 or bytes >= budget or #taken >= want
end

local function take_new()
    local step = 1
    while not full do
        local asked = math.min(step, want - #taken)
        local read = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', asked, 'STREAMS', stream, '>')
        local entries = read and read[1][2] or {}
        for _, entry in ipairs(entries) do take(entry, 1, 0) end
        if #entries < asked then return end
        step = next_step(step, heaviest, budget)
    end
end
"""
)

#: Keys: stream, free. Arguments: group, consumer, count, the name of the body's field, bytes of the largest body, bytes
#: of one fetch, last delivery with a body. Returns new entries, each with its id, its fields, the number of claims, the
#: number of uncounted ones, and the size of a body that is left out or -1.
READ: Final = Script(_HELPERS + _TAKE + "take_new()\nreturn taken\n")

#: Keys: stream, free, later, due, bell. Arguments: those of READ, lease in ms, cursor of the search for expired claims
#: or '', 1 if the consumer waits for a notification. Returns the cursor, the claimed entries as READ does, and 1 if the
#: memory limit is reached; if it waits and there are no entries, also the last delivered id, the id of the last
#: notification, and the ms until a message becomes due or -1.
FETCH: Final = Script(
    _HELPERS
    + _TAKE
    + f"""
local later, due, bell = KEYS[3], KEYS[4], KEYS[5]
local lease, cursor = ARGV[8], ARGV[9]
local now = milliseconds()
-- Changes nothing, and is rejected at the memory limit; the server checks that only before the first write.
memory_full = is_out_of_memory(redis.pcall('ZADD', due, 'XX', 0, ''))
for _, id in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', 0, {MAX_DUE_PER_FETCH})) do
    local entry = redis.call('XRANGE', later, id, id)[1]
    if entry == nil or added(stream, entry[2]) then
        redis.call('ZREM', due, id)
        redis.call('XDEL', later, id)
    end
end

local function take_again(entry)
    -- Before Redis 7 an entry that was deleted meanwhile is returned as nil.
    if not entry or not entry[2] then return end
    local pending = redis.call('XPENDING', stream, group, entry[1], entry[1], 1)[1]
    take(entry, pending[4], tonumber(redis.call('HGET', free, entry[1]) or 0))
end

-- One by one: a claim counts a delivery, and most of these are taken alone.
local looks = 0
while cursor ~= '' and not full and looks < want do
    local claimed = redis.call('XAUTOCLAIM', stream, group, me, lease, cursor, 'COUNT', 1)
    cursor, looks = claimed[1], looks + 1
    for _, entry in ipairs(claimed[2]) do take_again(entry) end
    if cursor == '0-0' then break end
end
if not full then
    for _, each in ipairs(redis.call('XPENDING', stream, group, '-', '+', want - #taken, RETURNED)) do
        if full then break end
        for _, entry in ipairs(redis.call('XCLAIM', stream, group, me, 0, each[1])) do take_again(entry) end
    end
end
take_new()
if #taken > 0 or ARGV[10] == '0' then
    return {{cursor, taken, memory_full and 1 or 0}}
end
local last, rung, soon = '0-0', '0-0', -1
for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local named = {{}}
    for at = 1, #info, 2 do named[info[at]] = info[at + 1] end
    if named['name'] == group then last = named['last-delivered-id'] end
end
local ring = redis.call('XREVRANGE', bell, '+', '-', 'COUNT', 1)[1]
if ring then rung = ring[1] end
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
if first[2] then soon = math.min(math.max(0, first[2] - now), 1e9) end
return {{cursor, taken, memory_full and 1 or 0, last, rung, soon}}
"""
)

#: Keys: dead. Arguments: the first id, the last id, count, the name of the body's field, bytes of the largest body,
#: bytes of one answer. Returns dead letters, each with its id, its fields, and the size of a body that is left out or
#: -1; none if there are no more.
LIST: Final = Script(
    _HELPERS
    + _MEASURE
    + """
local from, body, largest, budget = ARGV[1], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6])
local listed, bytes, heaviest, step = {}, 0, 0, 1
while #listed < tonumber(ARGV[3]) do
    local asked = math.min(step, tonumber(ARGV[3]) - #listed)
    local entries = redis.call('XRANGE', KEYS[1], from, ARGV[2], 'COUNT', asked)
    for _, entry in ipairs(entries) do
        local fields = spread(entry[2])
        local size, total = measure(fields, body)
        local weight = size > largest and 0 or total
        heaviest = math.max(heaviest, total)
        if #listed > 0 and bytes + weight > budget then return listed end
        bytes = bytes + weight
        local unread = size > largest
        listed[#listed + 1] = {entry[1], unread and without_body(fields, body) or entry[2], unread and size or -1}
        from = '(' .. entry[1]
    end
    if #entries < asked then break end
    step = next_step(step, heaviest, budget)
end
return listed
"""
)

#: Whether a claim still exists: the entry is pending for this consumer with this count of claims.
_HELD: Final = """
local function held(stream, group, me, id, count)
    local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
    return pending and pending[2] == me and pending[4] == tonumber(count)
end
"""

#: Keys: stream, later, due, free, dead, bell. Arguments: group, consumer, the number of acks, id and count of each;
#: then of every other settlement its kind, id, count and three more values. Returns a letter each: s for settled, l
#: for lost, f for failed, or m if the memory limit is reached. ``gone`` notes an entry that is settled: all of them are
#: acked and deleted together at the end, and ``over`` keeps a second settlement of one entry from taking effect.
SETTLE: Final = Script(
    _HELPERS
    + _HELD
    + """
local stream, later, due, free, dead, bell = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local group, me, acks = ARGV[1], ARGV[2], tonumber(ARGV[3])
-- Other consumer groups of this stream still need the entries that are settled here.
local alone = #redis.call('XINFO', 'GROUPS', stream) == 1
local counted = redis.call('EXISTS', free) == 1
local answers, done, over = {}, {}, {}

local function gone(id)
    done[#done + 1] = id
    over[id] = true
    return 's'
end

-- One read of all pending entries takes as long as three single ones; entries that it misses are read singly.
local mine = {}
if acks > 3 then
    for _, pending in ipairs(redis.call('XPENDING', stream, group, '-', '+', acks + 10, me)) do
        mine[pending[1]] = pending[4]
    end
end
for at = 4, 2 + 2 * acks, 2 do
    local id, count = ARGV[at], ARGV[at + 1]
    local yes = not over[id]
    if yes and mine[id] then
        yes = mine[id] == tonumber(count)
    elseif yes then
        yes = held(stream, group, me, id, count)
    end
    answers[#answers + 1] = yes and gone(id) or 'l'
end

local function content(id)
    local entry = redis.call('XRANGE', stream, id, id)[1]
    return entry and entry[2]
end

local rung = false
local settle = {
    ack = gone,
    release = function(id)
        redis.call('XCLAIM', stream, group, RETURNED, 0, id, 'JUSTID')
        redis.call('HINCRBY', free, id, 1)
        rung = true
        return 's'
    end,
    -- The delay in ms, the fields that replace others, and the names of those.
    later = function(id, delay, replaced, fields)
        local kept = content(id)
        if not kept then
            gone(id)
            return 'l'
        end
        local drop = {}
        for _, name in ipairs(cjson.decode(replaced)) do drop[name] = true end
        kept = without(kept, drop)
        for _, text in ipairs(cjson.decode(fields)) do kept[#kept + 1] = text end
        kept = packed(kept)
        delay = tonumber(delay)
        if delay <= 0 then
            return added(stream, kept) and gone(id) or refused()
        end
        local place = added(later, kept)
        if not place then return refused() end
        local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')
        local moment = milliseconds() + delay
        redis.call('ZADD', due, moment, place)
        -- A listener that waits for a later due time has to be notified.
        if not first[2] or moment < tonumber(first[2]) then rung = true end
        return gone(id)
    end,
    -- The fields that describe the dead letter.
    dead = function(id, said)
        local kept = content(id)
        if not kept then
            gone(id)
            return 'l'
        end
        kept = packed(without(kept, {}))
        for _, text in ipairs(cjson.decode(said)) do kept[#kept + 1] = text end
        return added(dead, kept) and gone(id) or refused()
    end,
}
for at = 4 + 2 * acks, #ARGV, 6 do
    local id = ARGV[at + 1]
    if not over[id] and held(stream, group, me, id, ARGV[at + 2]) then
        answers[#answers + 1] = settle[ARGV[at]](id, ARGV[at + 3], ARGV[at + 4], ARGV[at + 5])
    else
        answers[#answers + 1] = 'l'
    end
end
if #done > 0 then
    redis.call('XACK', stream, group, unpack(done))
    if alone then redis.call('XDEL', stream, unpack(done)) end
    if counted then redis.call('HDEL', free, unpack(done)) end
end
if rung then rings(bell) end
return table.concat(answers)
"""
)

#: Keys: later, due, bell. Arguments: for each message its delay in ms, the number of its fields and values, and these.
#: Adds all of them or, where the server rejects the first, none.
DELAY: Final = Script(
    _HELPERS
    + """
local later, due, bell = KEYS[1], KEYS[2], KEYS[3]
local first = redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]
local soonest, at = first and tonumber(first), 1
-- A millisecond more, because the time is rounded down.
local now, rung = milliseconds() + 1, false
while at <= #ARGV do
    local moment, size, fields = now + tonumber(ARGV[at]), tonumber(ARGV[at + 1]), {}
    for field = 1, size do fields[field] = ARGV[at + 1 + field] end
    redis.call('ZADD', due, moment, redis.call('XADD', later, '*', unpack(packed(fields))))
    if not soonest or moment < soonest then soonest, rung = moment, true end
    at = at + 2 + size
end
if rung then rings(bell) end
return 's'
"""
)

#: Keys: stream. Arguments: group, consumer, id and count of each claim. Returns 1 for each that exists, otherwise 0.
EXTEND: Final = Script(
    _HELD
    + """
local stream, group, me = KEYS[1], ARGV[1], ARGV[2]
local answers, mine = {}, {}
for at = 3, #ARGV, 2 do
    local yes = held(stream, group, me, ARGV[at], ARGV[at + 1])
    answers[#answers + 1] = yes and '1' or '0'
    if yes then mine[#mine + 1] = ARGV[at] end
end
-- JUSTID keeps the count unchanged, and only the idle time restarts.
if #mine > 0 then
    mine[#mine + 1] = 'JUSTID'
    redis.call('XCLAIM', stream, group, me, 0, unpack(mine))
end
return table.concat(answers)
"""
)

#: Keys: stream, dead. Arguments: the number of fields to leave out, their names, then the handles. Returns a letter
#: each: s for replayed, g for missing, f for failed.
REPLAY: Final = Script(
    _HELPERS
    + """
local stream, dead, drop, answers = KEYS[1], KEYS[2], {}, {}
local names = tonumber(ARGV[1])
for at = 2, 1 + names do drop[ARGV[at]] = true end
for at = 2 + names, #ARGV do
    local entry = redis.call('XRANGE', dead, ARGV[at], ARGV[at])[1]
    if not entry then
        answers[#answers + 1] = 'g'
    elseif added(stream, packed(without(entry[2], drop))) then
        redis.call('XDEL', dead, ARGV[at])
        answers[#answers + 1] = 's'
    else
        answers[#answers + 1] = 'f'
    end
end
return table.concat(answers)
"""
)

#: Keys: stream, dead. Arguments: the id of a dead letter, then the fields of the message that replaces it. Returns the
#: letter of a replay.
REPLACE: Final = Script(
    _HELPERS
    + """
local stream, dead, fields = KEYS[1], KEYS[2], {}
for at = 2, #ARGV do fields[at - 1] = ARGV[at] end
if not redis.call('XRANGE', dead, ARGV[1], ARGV[1])[1] then return 'g' end
if not added(stream, packed(fields)) then return 'f' end
redis.call('XDEL', dead, ARGV[1])
return 's'
"""
)

#: Keys: stream, later, due, dead. Arguments: group. Returns the numbers of ready, delayed, in-flight and dead messages,
#: and the age of the oldest ready one in ms, or -1. ``groups`` is odd if the group exists, and above 1 if there are
#: others; ``ripe`` counts deferred messages that are due, ``fresh`` those that were never delivered.
DEPTH: Final = Script(
    _HELPERS
    + """
local stream, later, due, dead, group = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local now = milliseconds()
local ripe = redis.call('ZCOUNT', due, '-inf', now)
local delayed, dead_letters = redis.call('XLEN', later) - ripe, redis.call('XLEN', dead)
local last, groups, lag = '0-0', 0, nil
if redis.call('EXISTS', stream) == 1 then
    for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
        local named = {}
        for at = 1, #info, 2 do named[info[at]] = info[at + 1] end
        if named['name'] == group then
            last, lag = named['last-delivered-id'], named['lag']
            groups = groups + 1
        else
            groups = groups + 2
        end
    end
end
local pending, returned = 0, 0
if groups % 2 == 1 then
    local summary = redis.call('XPENDING', stream, group)
    pending = summary[1]
    for _, each in ipairs(summary[4] or {}) do
        if each[1] == RETURNED then returned = tonumber(each[2]) end
    end
end
local fresh = redis.call('XLEN', stream) - pending
if groups > 1 then
    -- Settled entries stay for the other groups, so that the length is not the number of ready ones.
    fresh = lag or #redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 100000)
end
local oldest = -1
local function older(id)
    if id then oldest = math.max(oldest, now - tonumber(string.match(id, '^%d+'))) end
end
local first = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
older(first and first[1])
if returned > 0 then
    older(redis.call('XPENDING', stream, group, '-', '+', 1, RETURNED)[1][1])
end
local soonest = ripe > 0 and redis.call('ZRANGE', due, 0, 0, 'WITHSCORES')[2]
if soonest then oldest = math.max(oldest, now - tonumber(soonest)) end
return {fresh + returned + ripe, delayed, pending - returned, dead_letters, oldest}
"""
)

#: Keys: the stream to search. Arguments: the id after which it continues, count, the name of the field with ids, the
#: wanted ids. Returns the last id it has read, the ids that are there, and the entries without such a field.
FIND_IDS: Final = Script(
    """
local wanted, found, unnamed, last = {}, {}, {}, false
for at = 4, #ARGV do wanted[ARGV[at]] = true end
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])) do
    local name = nil
    for at = 1, #entry[2], 2 do
        if entry[2][at] == ARGV[3] then name = entry[2][at + 1] end
    end
    if name == nil then
        unnamed[#unnamed + 1] = entry[2]
    elseif wanted[name] then
        found[#found + 1] = name
    end
    last = entry[1]
end
return {last, found, unnamed}
"""
)

#: Keys: stream. Arguments: group, ms of idleness after which a consumer without claims is removed. Removing one with
#: claims would delete them, so the check and the removal are one step. Where other groups read the stream, settled
#: entries were left to them: this trims the entries that all groups have finished.
CLEAN_UP: Final = Script(
    _HELPERS
    + """
local stream, group, idle = KEYS[1], ARGV[1], tonumber(ARGV[2])
local groups = redis.call('XINFO', 'GROUPS', stream)
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
    local named = {}
    for at = 1, #info, 2 do named[info[at]] = info[at + 1] end
    if named['pending'] == 0 and named['idle'] > idle and named['name'] ~= RETURNED then
        redis.call('XGROUP', 'DELCONSUMER', stream, group, named['name'])
    end
end
if #groups < 2 then return 0 end

local function parts(id)
    local ms, number = string.match(id, '^(%d+)-(%d+)$')
    return tonumber(ms), tonumber(number)
end

local function before(one, other)
    local ms, number = parts(one)
    local other_ms, other_number = parts(other)
    return ms < other_ms or (ms == other_ms and number < other_number)
end

local lowest = nil
for _, info in ipairs(groups) do
    local named = {}
    for at = 1, #info, 2 do named[info[at]] = info[at + 1] end
    local keep = named['last-delivered-id']
    local summary = redis.call('XPENDING', stream, named['name'])
    if summary[1] > 0 and before(summary[2], keep) then keep = summary[2] end
    if lowest == nil or before(keep, lowest) then lowest = keep end
end
-- The last delivered entry stays too: slightly more than needed is kept, never less.
return redis.call('XTRIM', stream, 'MINID', lowest)
"""
)

#: Keys: stream. Arguments: group, consumer. Removes a consumer without claims.
REMOVE_CONSUMER: Final = Script("""
if #redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2]) == 0 then
    return redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
end
return 0
""")
