-- Wireshark dissector for aeon-flow, the frame protocol of aeon-station. The wire is described in proto/SPEC.md and its
-- companion pages; names of faults are theirs. Works with the Lua of Wireshark 3.6 to 4.x (5.2 to 5.4: no bit library and
-- no integer operators are used). README.md beside this file says how to install it and what one sees.
--
-- Nothing in a packet may raise a Lua error: every offset is checked against what was captured before it is read.

local HEADER_LEN, PREFIX_LEN, MAX_PAYLOAD = 10, 4, 0xffffff
local MAX_FRAME = HEADER_LEN + MAX_PAYLOAD
local MAX_DEPTH = 32
-- What is looked at in large bodies, so that opening a capture does not take minutes.
local MAX_SCANNED = 16384
local MAX_BLOCKS = 256
local FORK_STREAM, ACK_STREAM = 0xfffe, 0xffff

local FORK, RACE, FOLD, VENT, FIN, RESPONSE, HELIX, ACK = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80

local routes = {
  [0x0000] = "HELLO", [0x0001] = "HEALTH", [0x0002] = "EMBED", [0x0003] = "FORWARD", [0x0004] = "LM_HEAD",
  [0x0005] = "RESET", [0x0006] = "BASIS_PUT", [0x0103] = "FORWARD_PCA", [0x0104] = "LM_HEAD_PCA",
  [0x0203] = "FORWARD_Q", [0x0204] = "LM_HEAD_Q", [0xb001] = "AMPLITUHEDRON_REPLAY",
  [0xb002] = "AMPLITUHEDRON_CAPTURE", [0xf001] = "SHARD_PUT", [0xf002] = "SHARD_GET",
  [FORK_STREAM] = "OPEN_STREAMS", [ACK_STREAM] = "ACKNOWLEDGEMENT",
}
local statuses = {
  [200] = "done", [204] = "no such entry", [400] = "malformed", [403] = "not allowed", [404] = "unknown",
  [409] = "conflict", [412] = "basis mismatch", [413] = "too large", [422] = "not finite", [499] = "cancelled",
  [500] = "station's own fault", [501] = "not served here", [503] = "overloaded", [504] = "deadline passed",
}
-- Body of a request, by route; FORWARD, FORWARD_PCA and FORWARD_Q answer alike, as do the heads.
local request_bodies = {
  [0x0002] = "u32", [0x0003] = "f32", [0x0004] = "f32", [0x0103] = "pcar", [0x0104] = "pcar", [0x0203] = "qres",
  [0x0204] = "qres", [0xb002] = "bwah",
}
-- What an answer holds whose meta does not say so (the original station's).
local answer_bodies = {
  [0x0002] = "f32", [0x0003] = "f32", [0x0103] = "f32", [0x0203] = "f32", [0x0004] = "u32", [0x0104] = "u32",
  [0x0204] = "u32", [0xb001] = "bwah",
}
-- Kinds of answers that are QRES bodies.
local quantised = { f16 = true, i8 = true, q3 = true, q4 = true, q5 = true, q6 = true, q7 = true, q8 = true }
local mimes = { [0] = "application/octet-stream", [1] = "application/json", [2] = "text/plain", [0xff] = "inline" }
local qres_formats = { [0] = "f16", [1] = "i8", [2] = "rotated" }
local bwah_flags = { [0x01] = "HIT", [0x03] = "HIT, TAIL_PRESENT" }

local aeon = Proto("aeonflow", "aeon-flow")
local fragments = Proto("aeonflow_frag", "aeon-flow fragment")

local f = {
  prefix = ProtoField.uint32("aeonflow.prefix", "Frame length in front", base.DEC, nil, nil, "10 + length"),
  stream = ProtoField.uint16("aeonflow.stream_id", "Route", base.HEX, routes),
  route = ProtoField.string("aeonflow.route", "Route name"),
  sequence = ProtoField.uint32("aeonflow.sequence", "Sequence", base.DEC),
  flags = ProtoField.uint8("aeonflow.flags", "Flags", base.HEX),
  fork = ProtoField.bool("aeonflow.flags.fork", "FORK (opens several streams)", 8, nil, FORK),
  race = ProtoField.bool("aeonflow.flags.race", "RACE (first answer wins)", 8, nil, RACE),
  fold = ProtoField.bool("aeonflow.flags.fold", "FOLD (merges answers)", 8, nil, FOLD),
  vent = ProtoField.bool("aeonflow.flags.vent", "VENT (failure, or cancel)", 8, nil, VENT),
  fin = ProtoField.bool("aeonflow.flags.fin", "FIN (last frame of its exchange)", 8, nil, FIN),
  response = ProtoField.bool("aeonflow.flags.response", "RESPONSE (POISON to a stock client)", 8, nil, RESPONSE),
  helix = ProtoField.bool("aeonflow.flags.helix", "HELIX (ignored)", 8, nil, HELIX),
  ack = ProtoField.bool("aeonflow.flags.ack", "ACK (of the fragmented transport)", 8, nil, ACK),
  length = ProtoField.uint24("aeonflow.length", "Payload length", base.DEC),
  kind = ProtoField.string("aeonflow.kind", "Kind"),
  stock = ProtoField.bool("aeonflow.stock", "Stock-client mode"),

  response_in = ProtoField.framenum("aeonflow.response_in", "Response in frame", base.NONE, frametype.RESPONSE),
  response_to = ProtoField.framenum("aeonflow.request_in", "Request in frame", base.NONE, frametype.REQUEST),
  time = ProtoField.relative_time("aeonflow.time", "Response time", "From the first copy of the request"),
  copy_of = ProtoField.framenum("aeonflow.copy_of", "Copy of the request in frame", base.NONE, frametype.RETRANS_PREV),
  answer_copy = ProtoField.framenum("aeonflow.answer_copy_of", "Copy of the answer in frame", base.NONE,
    frametype.RETRANS_PREV),
  copies = ProtoField.uint32("aeonflow.copies", "Copies of the request seen so far", base.DEC),
  cancels = ProtoField.framenum("aeonflow.cancels", "Cancels the request in frame", base.NONE, frametype.REQUEST),

  meta_len = ProtoField.uint16("aeonflow.meta_len", "Meta length", base.DEC),
  meta = ProtoField.string("aeonflow.meta", "Meta"),
  status = ProtoField.uint16("aeonflow.status", "Status", base.DEC, statuses),
  error = ProtoField.string("aeonflow.error", "Error"),
  session = ProtoField.string("aeonflow.session", "Session"),
  pos = ProtoField.uint64("aeonflow.pos", "Position", base.DEC),

  body = ProtoField.bytes("aeonflow.body", "Body"),
  body_len = ProtoField.uint32("aeonflow.body.len", "Body length", base.DEC),
  body_kind = ProtoField.string("aeonflow.body.kind", "Body kind"),
  count = ProtoField.uint32("aeonflow.body.count", "Values", base.DEC),
  dim = ProtoField.uint32("aeonflow.body.dim", "Values a position", base.DEC),
  positions = ProtoField.uint32("aeonflow.body.positions", "Positions", base.DEC),
  f32 = ProtoField.float("aeonflow.body.f32", "Value"),
  u32 = ProtoField.uint32("aeonflow.body.u32", "Id", base.DEC),
  opens = ProtoField.uint16("aeonflow.opens", "Opens", base.HEX, routes),

  pcar = ProtoField.bytes("aeonflow.pcar", "PCAR block"),
  pcar_tag = ProtoField.string("aeonflow.pcar.tag", "Tag"),
  pcar_boundary = ProtoField.uint32("aeonflow.pcar.boundary", "Boundary", base.DEC),
  pcar_k = ProtoField.uint32("aeonflow.pcar.k", "Components", base.DEC),
  pcar_dim = ProtoField.uint32("aeonflow.pcar.hidden_dim", "hidden_dim", base.DEC),
  pcar_methodology = ProtoField.uint32("aeonflow.pcar.methodology", "Methodology", base.HEX),
  pcar_basis = ProtoField.uint32("aeonflow.pcar.basis_fp", "Basis", base.HEX),
  pcar_components = ProtoField.bytes("aeonflow.pcar.components", "Component values"),
  pcar_component = ProtoField.float("aeonflow.pcar.component", "Component"),
  qres = ProtoField.bytes("aeonflow.qres", "QRES header"),
  qres_tag = ProtoField.string("aeonflow.qres.tag", "Tag"),
  qres_boundary = ProtoField.uint32("aeonflow.qres.boundary", "Boundary", base.DEC),
  qres_dim = ProtoField.uint32("aeonflow.qres.hidden_dim", "hidden_dim", base.DEC),
  qres_seq = ProtoField.uint32("aeonflow.qres.seq", "Positions", base.DEC),
  qres_basis = ProtoField.uint32("aeonflow.qres.basis_fp", "Basis", base.HEX),
  qres_methodology = ProtoField.uint32("aeonflow.qres.methodology", "Methodology", base.HEX),
  qres_format = ProtoField.uint8("aeonflow.qres.format", "Format", base.DEC, qres_formats),
  qres_bits = ProtoField.uint8("aeonflow.qres.bits", "Bits", base.DEC),
  qres_flags = ProtoField.uint16("aeonflow.qres.flags", "Flags", base.HEX),
  qres_seed = ProtoField.uint32("aeonflow.qres.seed", "Seed", base.HEX),
  qres_bitmap = ProtoField.bytes("aeonflow.qres.bitmap", "Escaped positions, a bit each"),
  qres_escaped = ProtoField.uint32("aeonflow.qres.escaped", "Escaped", base.DEC),
  qres_positions = ProtoField.bytes("aeonflow.qres.positions", "Numbers"),

  bwah = ProtoField.bytes("aeonflow.bwah", "BWAH"),
  bwah_form = ProtoField.string("aeonflow.bwah.form", "Form"),
  bwah_version = ProtoField.uint8("aeonflow.bwah.version", "Version", base.DEC),
  bwah_flags = ProtoField.uint8("aeonflow.bwah.flags", "Flags", base.HEX, bwah_flags),
  bwah_tail_len = ProtoField.uint32("aeonflow.bwah.tail_len", "Tail blob length", base.DEC),
  bwah_kv_len = ProtoField.uint32("aeonflow.bwah.kv_len", "KV blob length", base.DEC),
  bwah_hash = ProtoField.uint64("aeonflow.bwah.prefix_hash", "Prefix hash", base.HEX),
  bwah_prefix_len = ProtoField.uint32("aeonflow.bwah.prefix_len", "Prefix length", base.DEC),
  bwah_lo = ProtoField.uint16("aeonflow.bwah.layer_lo", "First layer", base.DEC),
  bwah_hi = ProtoField.uint16("aeonflow.bwah.layer_hi", "Layer behind the last", base.DEC),

  bw = ProtoField.bytes("aeonflow.bw", ".bw blob"),
  bw_role = ProtoField.string("aeonflow.bw.role", "Holds"),
  bw_version = ProtoField.uint8("aeonflow.bw.version", "Version", base.HEX),
  bw_mime = ProtoField.uint8("aeonflow.bw.mime_code", "Type", base.HEX, mimes),
  bw_fp48 = ProtoField.bytes("aeonflow.bw.fp48", "fp48 (low byte first)"),
  bw_word = ProtoField.uint8("aeonflow.bw.word_bits", "Word bits", base.DEC),
  bw_parity = ProtoField.uint8("aeonflow.bw.parity_bits", "Parity bits", base.DEC),
  bw_ext_len = ProtoField.uint8("aeonflow.bw.mime_ext_len", "Inline type length", base.DEC),
  bw_ext = ProtoField.string("aeonflow.bw.mime_ext", "Inline type"),
  bw_orig = ProtoField.uint32("aeonflow.bw.orig_len", "Content length", base.DEC),
  bw_tail_len = ProtoField.uint8("aeonflow.bw.tail_len", "Bytes behind the last word", base.DEC),
  bw_tail = ProtoField.bytes("aeonflow.bw.tail", "Bytes behind the last word"),
  bw_high = ProtoField.bytes("aeonflow.bw.parity", "High 16 bits of each word"),
  bw_low = ProtoField.bytes("aeonflow.bw.packed", "Low 48 bits of each word"),

  ack_stream = ProtoField.uint16("aeonflow.ack.stream_id", "Stream", base.HEX),
  ack_base = ProtoField.uint32("aeonflow.ack.base", "Base", base.DEC),
  ack_bits = ProtoField.uint64("aeonflow.ack.bits", "Bits", base.HEX),
  ack_seq = ProtoField.string("aeonflow.ack.sequences", "Sequences that have come"),
  rest = ProtoField.bytes("aeonflow.rest", "Not read"),
}
local g = {
  id = ProtoField.uint16("aeonflow_frag.id", "Frame id", base.DEC),
  index = ProtoField.uint8("aeonflow_frag.index", "Part", base.DEC),
  total = ProtoField.uint8("aeonflow_frag.total", "Parts", base.DEC),
  part = ProtoField.bytes("aeonflow_frag.part", "Part of a frame"),
  whole_in = ProtoField.framenum("aeonflow_frag.reassembled_in", "Whole in frame"),
  part_in = ProtoField.framenum("aeonflow_frag.fragment", "Part in frame"),
}

-- Keys of the meta that become fields of their own: the value is the type that SPEC.md gives them.
local meta_types = {
  content_type = "string", accept = "strings", accept_basis = "strings", accept_k = "number", boundary = "number",
  config_fp = "string", deadline_ms = "number", timing = "any", ["return"] = "string", top_k = "number", ["in"] = "string",
  out = "string", fp48 = "string", trace = "string", token = "string", pad = "string", body = "string", seq = "number",
  layers = "strings", dim = "number", expected_pos = "number", have = "strings", methodology = "any",
  max_frame = "number", max_datagram = "number", max_seq = "number", context_len = "number", retry_after_ms = "number",
  hidden_dim = "number", vocab = "number", kept = "strings", max_replay_bytes = "number", max_shard_entry = "number",
  prefix_hash = "any", prefix_len = "any", layer_lo = "any", layer_hi = "any", prefix_digest = "string",
  mesh_fp = "string", exact = "boolean", basis_fp = "string", provenance = "string", slab_bytes = "number",
  spliced = "boolean", captured = "boolean", held = "number", held_bytes = "number", vented = "number",
  capacity = "number", capacity_bytes = "number", shard = "string", key = "string", value = "any",
  accepts = "strings", boundaries = "strings", draining = "boolean", uptime_ms = "number", requests = "number",
  errors = "number", connections = "number", sessions = "number", queued = "number",
}
local meta_fields = {}
for key, kind in pairs(meta_types) do
  local make = kind == "number" and ProtoField.uint64 or kind == "boolean" and ProtoField.bool or ProtoField.string
  meta_fields[key] = make("aeonflow.meta." .. key, key)
end
local nested = {
  model = { name = "string", hidden_dim = "number", vocab = "number", n_layers = "number", max_position = "number",
    config_fp = "string", layers_fp = "string" },
  station = { name = "string", version = "string", uptime_ms = "number" },
  limits = { max_frame = "number", max_datagram = "number", max_seq = "number" },
  timing = { queue_us = "number", lift_us = "number", compute_us = "number" },
}
local nested_fields = {}
for outer, keys in pairs(nested) do
  nested_fields[outer] = {}
  for key, kind in pairs(keys) do
    local make = kind == "number" and ProtoField.uint64 or ProtoField.string
    nested_fields[outer][key] = make("aeonflow.meta." .. outer .. "." .. key, outer .. "." .. key)
  end
end

local fields = {}
for _, field in pairs(f) do fields[#fields + 1] = field end
for _, field in pairs(meta_fields) do fields[#fields + 1] = field end
for _, keys in pairs(nested_fields) do
  for _, field in pairs(keys) do fields[#fields + 1] = field end
end
aeon.fields = fields
fragments.fields = { g.id, g.index, g.total, g.part, g.whole_in, g.part_in }

local function malformed(name, text)
  return ProtoExpert.new("aeonflow." .. name, text, expert.group.MALFORMED, expert.severity.ERROR)
end
local e = {
  length = malformed("bad_length", "The length is not that of the frame"),
  oversize = malformed("oversize", "The frame is longer than a frame can be"),
  meta = malformed("bad_meta", "The meta is not one JSON object"),
  duplicate = malformed("duplicate_key", "A key of the meta stands twice"),
  meta_len = malformed("bad_meta_len", "The meta ends behind the payload"),
  meta_type = ProtoExpert.new("aeonflow.bad_meta_type", "A known key of the meta has a value of another type",
    expert.group.PROTOCOL, expert.severity.WARN),
  payload = malformed("short_payload", "A request needs a payload of at least 2 bytes"),
  body = malformed("bad_body", "The body does not have the form that its route asks for"),
  pcar = malformed("bad_pcar", "Not a row of PCAR blocks"),
  qres = malformed("bad_qres", "Not a QRES body"),
  bwah = malformed("bad_bwah", "Not a BWAH envelope"),
  bw = malformed("bad_bw", "Not a .bw blob"),
  fragment = malformed("bad_fragment", "Not a part of a frame"),
  acknowledgement = malformed("bad_ack", "Not an acknowledgement"),
  finite = ProtoExpert.new("aeonflow.not_finite", "NaN or infinity", expert.group.PROTOCOL, expert.severity.WARN),
  cut = ProtoExpert.new("aeonflow.cut", "Not all bytes of the frame were captured", expert.group.UNDECODED,
    expert.severity.NOTE),
  large = ProtoExpert.new("aeonflow.not_shown", "Too large to be shown or checked whole", expert.group.UNDECODED,
    expert.severity.CHAT),
  failure = ProtoExpert.new("aeonflow.failure", "The station could not do it", expert.group.RESPONSE_CODE,
    expert.severity.WARN),
  miss = ProtoExpert.new("aeonflow.miss", "The prefix cache has no such entry", expert.group.RESPONSE_CODE,
    expert.severity.CHAT),
  cancel = ProtoExpert.new("aeonflow.cancel", "Cancels a request", expert.group.SEQUENCE, expert.severity.NOTE),
  ignored = ProtoExpert.new("aeonflow.never_answered", "A station never answers this frame", expert.group.PROTOCOL,
    expert.severity.NOTE),
  unknown = ProtoExpert.new("aeonflow.unknown_route", "No route has this number", expert.group.UNDECODED,
    expert.severity.NOTE),
  copy = ProtoExpert.new("aeonflow.copy", "Repeated", expert.group.SEQUENCE, expert.severity.NOTE),
  unasked = ProtoExpert.new("aeonflow.no_request", "The request of this answer is not in the capture",
    expert.group.SEQUENCE, expert.severity.NOTE),
  unanswered = ProtoExpert.new("aeonflow.no_response", "No answer to this request is in the capture",
    expert.group.SEQUENCE, expert.severity.NOTE),
}
local experts = {}
for _, item in pairs(e) do experts[#experts + 1] = item end
aeon.experts = experts

local PREFIXED, BARE, DETECT = 1, 2, 0
aeon.prefs.udp_ports = Pref.range("UDP ports", "", "UDP ports of stations; others are recognised by their bytes", 65535)
aeon.prefs.tcp_ports = Pref.range("TCP ports", "", "TCP ports of stations; others are recognised by their bytes", 65535)
aeon.prefs.fragment_ports = Pref.range("Fragmented UDP ports", "",
  "UDP ports that carry the fragmented transport; it is never recognised by its bytes", 65535)
aeon.prefs.framing = Pref.enum("Frames on TCP", DETECT, "Whether each frame has its length in front", {
  { 1, "detect", DETECT }, { 2, "prefixed", PREFIXED }, { 3, "bare", BARE },
}, false)
aeon.prefs.heuristics = Pref.bool("Recognise frames on other ports", true, "By their lengths, flags and meta")
aeon.prefs.values = Pref.uint("Values shown", 16, "Values of a body that are shown one by one")

local tcp_stream, udp_stream = Field.new("tcp.stream"), Field.new("udp.stream")
local json = Dissector.get("json")

-- State of the whole capture: a table for each conversation, and what each fragmented frame was made of.
local conversations, joining, joined = {}, {}, {}
function aeon.init()
  conversations, joining, joined = {}, {}, {}
end

local function has(flags, bit) return math.floor(flags / bit) % 2 == 1 end
local function any(flags, ...)
  for _, bit in ipairs({ ... }) do
    if has(flags, bit) then return true end
  end
  return false
end

local function be(s, at, len) -- unsigned big-endian of a string, at most 4 bytes; `at` counts from 1
  local value = 0
  for i = at, at + len - 1 do value = value * 256 + s:byte(i) end
  return value
end
local function le(s, at, len)
  local value = 0
  for i = at + len - 1, at, -1 do value = value * 256 + s:byte(i) end
  return value
end

local function plural(n, word) return n .. " " .. word .. (n == 1 and "" or "s") end

-- ---- JSON ------------------------------------------------------------------------------------------------------------
-- The rules of SPEC.md, "Payload". Arrays are tables with `n`, objects tables with `keys` (in order) and `of`; so none of
-- them is taken for the other and a key named `n` does no harm.

local null = {}

local function is_utf8(s)
  local at, len = 1, #s
  while at <= len do
    local c = s:byte(at)
    local more, low, high = 0, 0x80, 0xbf
    if c < 0x80 then more = 0
    elseif c >= 0xc2 and c <= 0xdf then more = 1
    elseif c >= 0xe0 and c <= 0xef then
      more = 2
      if c == 0xe0 then low = 0xa0 elseif c == 0xed then high = 0x9f end
    elseif c >= 0xf0 and c <= 0xf4 then
      more = 3
      if c == 0xf0 then low = 0x90 elseif c == 0xf4 then high = 0x8f end
    else return false end
    for i = 1, more do
      local d = s:byte(at + i)
      if not d or d < low or d > high then return false end
      low, high = 0x80, 0xbf
    end
    at = at + 1 + more
  end
  return true
end

local function utf8_char(code)
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(0xc0 + math.floor(code / 64), 0x80 + code % 64) end
  if code < 0x10000 then
    return string.char(0xe0 + math.floor(code / 4096), 0x80 + math.floor(code / 64) % 64, 0x80 + code % 64)
  end
  return string.char(0xf0 + math.floor(code / 262144), 0x80 + math.floor(code / 4096) % 64,
    0x80 + math.floor(code / 64) % 64, 0x80 + code % 64)
end

local escapes = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }

-- Returns the value of `s`, the key that stands twice or nil; or nil and what is wrong.
local function parse_json(s)
  local at, duplicate = 1, nil
  local function fail(what) error({ what = what .. " at byte " .. (at - 1) }, 0) end
  local function space() at = s:find("[^ \t\r\n]", at) or #s + 1 end
  local function unit()
    local hex = s:match("^%x%x%x%x", at)
    if not hex then fail("bad escape") end
    at = at + 4
    return tonumber(hex, 16)
  end
  local function text()
    at = at + 1
    local out = {}
    while true do
      local plain = s:match('^[^"\\%c]+', at)
      if plain then
        out[#out + 1] = plain
        at = at + #plain
      end
      local c = s:sub(at, at)
      if c == '"' then
        at = at + 1
        return table.concat(out)
      elseif c == "\127" then
        out[#out + 1] = c
        at = at + 1
      elseif c == "\\" then
        local x = s:sub(at + 1, at + 1)
        at = at + 2
        if x == "u" then
          local code = unit()
          if code >= 0xd800 and code < 0xdc00 then
            if s:sub(at, at + 1) ~= "\\u" then fail("half a surrogate pair") end
            at = at + 2
            local low = unit()
            if low < 0xdc00 or low > 0xdfff then fail("half a surrogate pair") end
            code = 0x10000 + (code - 0xd800) * 1024 + low - 0xdc00
          elseif code >= 0xdc00 and code <= 0xdfff then fail("half a surrogate pair") end
          out[#out + 1] = utf8_char(code)
        elseif escapes[x] then out[#out + 1] = escapes[x]
        else fail("bad escape") end
      else fail(c == "" and "string without an end" or "control character in a string") end
    end
  end
  local value
  local function array(depth)
    local out = { n = 0 }
    at = at + 1
    space()
    if s:sub(at, at) == "]" then at = at + 1 return out end
    while true do
      out.n = out.n + 1
      out[out.n] = value(depth + 1)
      space()
      local c = s:sub(at, at)
      at = at + 1
      if c == "]" then return out end
      if c ~= "," then fail("no comma or bracket") end
    end
  end
  local function object(depth)
    local out = { keys = {}, of = {} }
    at = at + 1
    space()
    if s:sub(at, at) == "}" then at = at + 1 return out end
    while true do
      space()
      if s:sub(at, at) ~= '"' then fail("no key") end
      local key = text()
      space()
      if s:sub(at, at) ~= ":" then fail("no colon") end
      at = at + 1
      if out.of[key] ~= nil then duplicate = duplicate or key else out.keys[#out.keys + 1] = key end
      out.of[key] = value(depth + 1)
      space()
      local c = s:sub(at, at)
      at = at + 1
      if c == "}" then return out end
      if c ~= "," then fail("no comma or brace") end
    end
  end
  function value(depth)
    space()
    local c = s:sub(at, at)
    if c == "{" or c == "[" then
      if depth > MAX_DEPTH then fail("more than 32 levels") end
      return c == "{" and object(depth) or c == "[" and array(depth)
    elseif c == '"' then return text() end
    for word, meaning in pairs({ ["true"] = true, ["false"] = false, ["null"] = null }) do
      if s:sub(at, at + #word - 1) == word then at = at + #word return meaning end
    end
    local number = s:match("^-?%d+", at)
    if not number or number:match("^-?0%d") then fail("no value") end
    number = number .. (s:match("^%.%d+", at + #number) or "")
    number = number .. (s:match("^[eE][+-]?%d+", at + #number) or "")
    at = at + #number
    return tonumber(number) or fail("no number")
  end
  local ok, result = pcall(function()
    local out = value(1)
    space()
    if at <= #s then fail("text behind the value") end
    return out
  end)
  if ok then return result, duplicate end
  return nil, type(result) == "table" and result.what or tostring(result)
end

local function shown(value)
  if value == null then return "null" end
  if type(value) == "table" and value.n then
    local out = {}
    for i = 1, value.n do out[i] = shown(value[i]) end
    return "[" .. table.concat(out, ", ") .. "]"
  elseif type(value) == "table" then return plural(#value.keys, "key")
  elseif type(value) == "number" and value == math.floor(value) and math.abs(value) < 2 ^ 53 then
    return string.format("%.0f", value)
  end
  return tostring(value)
end

local function is_count(value)
  return type(value) == "number" and value >= 0 and value < 2 ^ 53 and value == math.floor(value)
end
local function u64(value) return UInt64.new(value % 2 ^ 32, math.floor(value / 2 ^ 32)) end

-- ---- Conversations and exchanges -------------------------------------------------------------------------------------

local function is_tcp(pinfo) return pinfo.port_type == 2 end

local function conversation(pinfo)
  local stream = (is_tcp(pinfo) and tcp_stream or udp_stream)()
  local key = (is_tcp(pinfo) and "tcp " or "udp ") .. tostring(stream and stream.value or "-")
  local found = conversations[key]
  if not found then
    found = { key = key, exchanges = {}, roles = {} }
    conversations[key] = found
  end
  return found
end

local function source(pinfo) return tostring(pinfo.src) .. " " .. tostring(pinfo.src_port) end
local function destination(pinfo) return tostring(pinfo.dst) .. " " .. tostring(pinfo.dst_port) end

-- Finds the exchange of this frame and the part that the frame has in it. It is settled when a packet is first seen;
-- Wireshark shows packets again in any order.
local function exchange(pinfo, conv, kind, frame)
  local asker = (kind == "response" or kind == "failure") and destination(pinfo) or source(pinfo)
  local key = asker .. " " .. frame.stream .. " " .. frame.sequence
  local id = pinfo.number .. " " .. kind .. " " .. key
  local role = conv.roles[id]
  if role or pinfo.visited then return role end
  local open = conv.exchanges[key]
  role = { part = kind }
  if kind == "request" then
    local print = frame.length .. " " .. frame.sample
    if open and open.print == print and (not is_tcp(pinfo) or not open.response) then
      open.copies = open.copies + 1
      role.part, role.of = "copy", open
      role.copies = open.copies
    else
      open = { request = pinfo.number, at = pinfo.rel_ts, print = print, session = frame.session, copies = 1 }
      conv.exchanges[key] = open
      role.of = open
    end
  elseif kind == "cancel" then
    role.of = open and not open.response and open or nil
  elseif open then
    role.of = open
    role.time = pinfo.rel_ts - open.at
    if open.response then role.part = "answer copy" else open.response = pinfo.number end
  end
  conv.roles[id] = role
  return role
end

local function show_exchange(tree, pinfo, kind, role)
  local of = role and role.of
  if kind == "cancel" then
    if of then tree:add(f.cancels, of.request):set_generated() end
    return
  elseif kind ~= "request" then
    if not of then
      tree:add_proto_expert_info(e.unasked)
      return
    end
    tree:add(f.response_to, of.request):set_generated()
    local seconds = math.floor(role.time)
    tree:add(f.time, NSTime.new(seconds, math.floor((role.time - seconds) * 1e9 + 0.5))):set_generated()
    if of.session then tree:add(f.session, of.session):set_generated() end
    if role.part == "answer copy" then
      tree:add(f.answer_copy, of.response):set_generated()
      tree:add_proto_expert_info(e.copy, "The request was answered before, in frame " .. of.response)
    end
    return
  end
  if not of then return end
  if role.part == "copy" then
    tree:add(f.copy_of, of.request):set_generated()
    tree:add(f.copies, role.copies):set_generated()
    tree:add_proto_expert_info(e.copy, "Copy of the request in frame " .. of.request)
  end
  if of.response then
    tree:add(f.response_in, of.response):set_generated()
  elseif pinfo.visited then
    tree:add_proto_expert_info(e.unanswered)
  end
end

-- ---- Bodies ----------------------------------------------------------------------------------------------------------
-- Each takes the range of the body, of which all bytes are there, and returns a text for the Info column.

local function scan_finite(tree, raw, what)
  local last = math.min(#raw - #raw % 4, 4 * MAX_SCANNED)
  for at = 1, last, 4 do
    local b2, b3 = raw:byte(at + 2, at + 3)
    if b2 >= 0x80 and b3 % 128 == 0x7f then
      tree:add_proto_expert_info(e.finite, string.format("%s %d is NaN or infinity", what, (at - 1) / 4))
      return
    end
  end
  if last < #raw - #raw % 4 then tree:add_proto_expert_info(e.large) end
end

local function show_values(tree, range, field, count)
  for i = 0, math.min(count, aeon.prefs.values) - 1 do tree:add_le(field, range:range(4 * i, 4)) end
end

local function packed_body(tree, range, kind, conv, frame, meta, answer)
  local len = range:len()
  if len % 4 ~= 0 then
    tree:add_proto_expert_info(e.body, len .. " bytes are no whole number of 4-byte values")
    return plural(len, "byte")
  end
  local count = len / 4
  tree:add(f.count, range, count):set_generated()
  local positions, dim
  -- FORWARD answers with the head's result for its last position only, whatever its `seq`.
  local head = answer and kind ~= "f32"
  local seq = answer and is_count(meta.seq) and meta.seq or nil
  if head and (frame.stream == 0x0003 or frame.stream == 0x0103 or frame.stream == 0x0203) then seq = 1 end
  if kind == "f32" then
    dim = answer and is_count(meta.dim) and meta.dim or conv.dim
  elseif kind == "u32" then dim = 1
  elseif seq and seq > 0 then dim = count / seq end
  if dim and dim >= 1 and dim < 2 ^ 32 then
    if count % dim == 0 and dim == math.floor(dim) then
      positions = count / dim
      tree:add(f.dim, range, dim):set_generated()
      tree:add(f.positions, range, positions):set_generated()
      if seq and seq ~= positions then
        tree:add_proto_expert_info(e.body, string.format("%.0f positions, but %.0f were asked for", positions, seq))
      end
    elseif answer then
      tree:add_proto_expert_info(e.body, string.format("%d values do not make whole positions of %s", count, shown(dim)))
    end
  end
  local field = (kind == "f32" or kind == "logits") and f.f32 or f.u32
  if kind ~= "topk" then show_values(tree, range, field, count) end
  if field == f.f32 then scan_finite(tree, range:raw(), "value") end
  if kind == "u32" and count == 1 then return "u32 " .. range:le_uint() end
  if positions then return string.format("%s %.0f×%.0f", kind, positions, dim) end
  return string.format("%s %d values", kind, count)
end

local function pcar_body(tree, range)
  local len, at, n, first = range:len(), 0, 0, nil
  local fault
  local function wrong(item, name, text)
    fault = name
    item:add_proto_expert_info(e.pcar, name .. ": " .. text)
  end
  if len == 0 then wrong(tree, "Truncated", "a body has at least one block") end
  while at < len and not fault do
    if len - at < 24 then
      wrong(tree, "Truncated", string.format("block %d has %d of at least 24 bytes", n, len - at))
      break
    end
    local head = range:range(at, 24)
    local raw = head:raw()
    local k = le(raw, 9, 4)
    local whole = math.min(24 + 4 * k, len - at)
    local show = n < MAX_BLOCKS
    local block = tree
    if show then
      block = tree:add(f.pcar, range:range(at, whole))
      block:set_text(string.format("PCAR block %d: boundary %d, %s of %d, methodology 0x%08x, basis 0x%08x", n,
        le(raw, 5, 4), plural(k, "component"), le(raw, 13, 4), le(raw, 17, 4), le(raw, 21, 4)))
      block:add(f.pcar_tag, head:range(0, 4))
      block:add_le(f.pcar_boundary, head:range(4, 4))
      block:add_le(f.pcar_k, head:range(8, 4))
      block:add_le(f.pcar_dim, head:range(12, 4))
      block:add_le(f.pcar_methodology, head:range(16, 4))
      block:add_le(f.pcar_basis, head:range(20, 4))
    end
    if raw:sub(1, 4) ~= "PCAR" then wrong(block, "BadTag", "block " .. n .. " does not begin with PCAR")
    elseif k == 0 then wrong(block, "ZeroComponents", "block " .. n .. " has no components")
    elseif k > 1073741817 then wrong(block, "LengthOverflow", "no block has so many components")
    elseif len - at < 24 + 4 * k then
      wrong(block, "Truncated", string.format("block %d has %d of %.0f bytes", n, len - at, 24 + 4 * k))
    else
      first = first or raw
      for i, name in ipairs({ "boundary", "k", "hidden_dim", "methodology", "basis_fp" }) do
        if raw:sub(4 * i + 1, 4 * i + 4) ~= first:sub(4 * i + 1, 4 * i + 4) then
          wrong(block, "HeaderDiffers", string.format("%s of block %d is not that of block 0", name, n))
          break
        end
      end
      local values = range:range(at + 24, 4 * k)
      if show then
        local item = block:add(f.pcar_components, values)
        show_values(item, values, f.pcar_component, k)
        scan_finite(item, values:raw(), "component")
      end
      at = at + 24 + 4 * k
      n = n + 1
    end
  end
  if n > MAX_BLOCKS then
    tree:add_proto_expert_info(e.large, string.format("%d of %d blocks are not shown", n - MAX_BLOCKS, n))
  end
  if fault then return "pcar " .. fault end
  tree:add(f.positions, range, n):set_generated()
  return string.format("pcar %d×%d of %d", n, le(first, 9, 4), le(first, 13, 4))
end

-- Bytes of a position of width d that is not escaped; nil for a format that is not defined.
local function qres_position(format, bits, d)
  if format == 0 and bits == 16 then return 2 * d end
  if format == 1 and bits == 8 then return 2 * math.ceil(d / 64) + d end
  if format == 2 and bits >= 3 and bits <= 8 then return 2 + math.ceil(d * bits / 8) end
end

local function bit_of(byte, n) return math.floor(byte / 2 ^ n) % 2 end

local function qres_body(tree, range)
  local raw, len = range:raw(), range:len()
  local function wrong(name, text, ...)
    tree:add_proto_expert_info(e.qres, name .. ": " .. string.format(text, ...))
    return "qres " .. name
  end
  if len >= 4 and raw:sub(1, 4) ~= "QRES" then return wrong("BadTag", "the body does not begin with QRES") end
  if len < 32 then return wrong("Truncated", "%d of at least 32 bytes", len) end
  local head = tree:add(f.qres, range:range(0, 32))
  head:add(f.qres_tag, range:range(0, 4))
  for i, field in ipairs({ f.qres_boundary, f.qres_dim, f.qres_seq, f.qres_basis, f.qres_methodology }) do
    head:add_le(field, range:range(4 * i, 4))
  end
  head:add_le(f.qres_format, range:range(24, 1))
  head:add_le(f.qres_bits, range:range(25, 1))
  head:add_le(f.qres_flags, range:range(26, 2))
  head:add_le(f.qres_seed, range:range(28, 4))
  local d, seq, basis, methodology, seed = le(raw, 9, 4), le(raw, 13, 4), le(raw, 17, 4), le(raw, 21, 4), le(raw, 29, 4)
  local format, bits, flags = raw:byte(25), raw:byte(26), le(raw, 27, 2)
  local plain = qres_position(format, bits, d)
  if not plain then return wrong("UnknownFormat", "format %d with %d bits", format, bits) end
  if flags > 1 then return wrong("UnknownFlags", "0x%04x", flags) end
  if d == 0 or d > 16777216 then return wrong("Width", "hidden_dim is %.0f, not 1 to 16777216", d) end
  if basis ~= 0 and format ~= 2 then return wrong("Unused", "this format has no basis_fp") end
  if methodology ~= 0 and basis == 0 then return wrong("Unused", "a methodology without a basis") end
  if seed ~= 0 and format ~= 2 then return wrong("Unused", "this format has no seed") end
  if seq == 0 then return wrong("NoPositions", "there is no sequence of no positions") end
  local bitmap_len = math.ceil(seq / 8)
  if len < 32 + bitmap_len then return wrong("Truncated", "%d of %.0f bytes of header and bitmap", len, 32 + bitmap_len) end
  local function is_escaped(n) return bit_of(raw:byte(33 + math.floor(n / 8)), n % 8) == 1 end
  local escaped = 0
  for n = 0, 8 * bitmap_len - 1 do
    if is_escaped(n) then
      if n >= seq then return wrong("Bitmap", "it marks positions beyond the last") end
      escaped = escaped + 1
    end
  end
  tree:add(f.qres_bitmap, range:range(32, bitmap_len))
  tree:add(f.qres_escaped, range:range(32, bitmap_len), escaped):set_generated()
  local whole = (flags == 1 and 4 or 2) * d
  local needed = 32 + bitmap_len + escaped * whole + (seq - escaped) * plain
  if needed ~= len then return wrong("Length", "%d bytes, but they take %.0f", len, needed) end
  tree:add(f.qres_positions, range:range(32 + bitmap_len, len - 32 - bitmap_len))
  local used = d * bits % 8
  if format == 2 and used ~= 0 then
    local at = 32 + bitmap_len
    for n = 0, seq - 1 do
      at = at + (is_escaped(n) and whole or plain)
      if not is_escaped(n) and raw:byte(at) >= 2 ^ used then
        return wrong("Padding", "position %d has bits after its last code", n)
      end
    end
  end
  tree:add(f.positions, range, seq):set_generated()
  local kind = format == 2 and "q" .. bits or qres_formats[format]
  return string.format("%s %d×%d%s", kind, seq, d, escaped > 0 and string.format(", %d escaped", escaped) or "")
end

-- One blob; the fingerprint is not checked (XXH64 needs 64-bit arithmetic). Returns the fault, if any.
local function bw_blob(tree, range, role)
  local len, raw = range:len(), range:raw()
  local blob = tree:add(f.bw, range)
  blob:set_text(string.format(".bw blob (%s): %s", role, plural(len, "byte")))
  blob:add(f.bw_role, role):set_generated()
  local function wrong(name, text)
    blob:add_proto_expert_info(e.bw, string.format("%s: %s", name, text))
    return name
  end
  if len < 15 then return wrong("Truncated", len .. " of 15 bytes of the header") end
  blob:add(f.bw_version, range:range(4, 1))
  blob:add(f.bw_mime, range:range(5, 1))
  blob:add(f.bw_fp48, range:range(6, 6))
  blob:add(f.bw_word, range:range(12, 1))
  blob:add(f.bw_parity, range:range(13, 1))
  blob:add(f.bw_ext_len, range:range(14, 1))
  local version, mime, ext = raw:byte(5), raw:byte(6), raw:byte(15)
  if raw:sub(1, 4) ~= "BWB1" then return wrong("BadMagic", "it does not begin with BWB1") end
  if version >= 0x20 then return wrong("UnsupportedFlags", "reserved bits of the version are set") end
  if version ~= 1 then return wrong("BadVersion", "version " .. version) end
  if not mimes[mime] then return wrong("UnknownMime", string.format("type 0x%02x", mime)) end
  if raw:byte(13) ~= 48 or raw:byte(14) ~= 16 then return wrong("WordSize", "words are not of 48 and 16 bits") end
  if mime ~= 0xff and ext ~= 0 then return wrong("UnexpectedMime", "an inline type beside a code") end
  if ext > 127 then return wrong("MimeTooLong", ext .. " bytes") end
  if len < 15 + ext then return wrong("Truncated", "it ends in the inline type") end
  if ext > 0 then
    blob:add(f.bw_ext, range:range(15, ext))
    local text = raw:sub(16, 15 + ext)
    if not is_utf8(text) then return wrong("MimeNotUtf8", "the inline type") end
    for _, known in pairs(mimes) do
      if text == known and known ~= "inline" then return wrong("NonCanonicalMime", text .. " has a code") end
    end
  end
  local at = 15 + ext
  if len < at + 5 then return wrong("Truncated", "it ends in the lengths") end
  local orig = le(raw, at + 1, 4)
  blob:add_le(f.bw_orig, range:range(at, 4))
  blob:add(f.bw_tail_len, range:range(at + 4, 1))
  if raw:byte(at + 5) ~= orig % 8 then return wrong("TailLen", string.format("%.0f mod 8 is another", orig)) end
  at = at + 5
  if len < at + orig then return wrong("Truncated", string.format("%d of %.0f bytes", len, at + orig)) end
  if len > at + orig then return wrong("TrailingBytes", plural(len - at - orig, "byte")) end
  local words = math.floor(orig / 8)
  if orig % 8 > 0 then blob:add(f.bw_tail, range:range(at, orig % 8)) end
  if words > 0 then
    blob:add(f.bw_high, range:range(at + orig % 8, 2 * words))
    blob:add(f.bw_low, range:range(at + orig % 8 + 2 * words, 6 * words))
  end
  if mime ~= 0 then return wrong("Mime", "an envelope holds application/octet-stream") end
  if orig % 4 ~= 0 then return wrong("Length", string.format("%.0f bytes are no whole number of f32", orig)) end
  blob:append_text(string.format(", %.0f f32 values", orig / 4))
  return nil, orig / 4
end

local function bwah_body(tree, range, is_reply)
  local len = range:len()
  local form = is_reply and "reply" or "capture"
  local envelope = tree:add(f.bwah, range)
  envelope:set_text("BWAH " .. form)
  envelope:add(f.bwah_form, form):set_generated()
  local function wrong(name, text)
    envelope:add_proto_expert_info(e.bwah, name .. ": " .. text)
    return "bwah " .. name
  end
  local head = is_reply and 14 or 30
  if len < head then return wrong("Truncated", string.format("%d of %d bytes of the header", len, head)) end
  local raw = range:range(0, head):raw()
  envelope:add(f.bwah_version, range:range(4, 1))
  envelope:add(f.bwah_flags, range:range(5, 1))
  envelope:add_le(f.bwah_tail_len, range:range(6, 4))
  envelope:add_le(f.bwah_kv_len, range:range(10, 4))
  if not is_reply then
    envelope:add_le(f.bwah_hash, range:range(14, 8))
    envelope:add_le(f.bwah_prefix_len, range:range(22, 4))
    envelope:add_le(f.bwah_lo, range:range(26, 2))
    envelope:add_le(f.bwah_hi, range:range(28, 2))
  end
  local flags, tail, kv = raw:byte(6), le(raw, 7, 4), le(raw, 11, 4)
  if raw:sub(1, 4) ~= "BWAH" then return wrong("BadMagic", "it does not begin with BWAH") end
  if raw:byte(5) ~= 1 then return wrong("BadVersion", "version " .. raw:byte(5)) end
  if not (flags == 3 or flags == 1 and is_reply and tail == 0) then
    return wrong("ReservedFlags", string.format("flags 0x%02x with a tail of %.0f bytes", flags, tail))
  end
  if len < head + tail + kv then
    return wrong("Truncated", string.format("%d of %.0f bytes", len, head + tail + kv))
  elseif len > head + tail + kv then
    return wrong("TrailingBytes", plural(len - head - tail - kv, "byte"))
  end
  local text = "bwah " .. form
  for _, blob in ipairs({ { "tail", head, tail, flags == 3 }, { "kv", head + tail, kv, not is_reply } }) do
    local role, at, size, needed = blob[1], blob[2], blob[3], blob[4]
    if size > 0 then
      local fault, count = bw_blob(envelope, range:range(at, size), role)
      if fault then return wrong("InnerBlobError", role .. ": " .. fault) end
      text = string.format("%s %s %.0f", text, role, count)
    elseif needed then
      return wrong("InnerBlobError", role .. ": Truncated")
    end
  end
  return text
end

local function opened_streams(tree, range)
  local len = range:len()
  for at = 0, len - len % 2 - 2, 2 do tree:add(f.opens, range:range(at, 2)) end
  if len % 2 == 1 then tree:add_proto_expert_info(e.body, "an opcode has 2 bytes") end
  return "opens " .. plural(math.floor(len / 2), "stream")
end

local function acknowledged(tree, range)
  local len = range and range:len() or 0
  local count = math.floor(len / 14)
  for at = 0, 14 * count - 14, 14 do
    local raw = range:range(at, 14):raw()
    local base_seq, names = be(raw, 3, 4), {}
    for bit = 0, 63 do
      local byte = raw:byte(14 - math.floor(bit / 8))
      -- A sum over the largest sequence number names nothing.
      if has(byte, 2 ^ (bit % 8)) and base_seq + bit <= 0xffffffff then
        names[#names + 1] = string.format("%.0f", base_seq + bit)
      end
    end
    local entry = tree:add(f.ack_stream, range:range(at, 2))
    entry:add(f.ack_base, range:range(at + 2, 4))
    entry:add(f.ack_bits, range:range(at + 6, 8))
    entry:add(f.ack_seq, range:range(at, 14), table.concat(names, " ")):set_generated()
  end
  if len % 14 ~= 0 then tree:add(f.rest, range:range(14 * count, len - 14 * count)) end
  return plural(count, "stream")
end

-- ---- Meta ------------------------------------------------------------------------------------------------------------

local function fits(value, kind)
  if kind == "any" then return true end
  if kind == "number" then return type(value) == "number" end
  if kind == "strings" then return type(value) == "table" and value.n ~= nil end
  return type(value) == kind
end

local function add_meta_item(tree, field, range, value, kind)
  if kind == "number" then
    if is_count(value) then tree:add(field, range, u64(value)) end
  elseif kind == "boolean" then tree:add(field, range, value)
  elseif kind == "strings" then
    for i = 1, value.n do tree:add(field, range, shown(value[i])) end
  else tree:add(field, range, shown(value)) end
end

-- Returns the members of the meta: an empty table where there are none or it cannot be read.
local function dissect_meta(tree, range, pinfo)
  local raw = range:raw()
  local branch = tree:add(f.meta, range)
  if not is_utf8(raw) then
    branch:add_proto_expert_info(e.meta, "The meta is not UTF-8")
    return {}, false
  end
  local object, problem = parse_json(raw)
  if object == nil then
    branch:add_proto_expert_info(e.meta, "The meta is not JSON: " .. problem)
    return {}, false
  elseif type(object) ~= "table" or not object.keys then
    branch:add_proto_expert_info(e.meta, "The meta is no JSON object")
    return {}, false
  end
  if problem then branch:add_proto_expert_info(e.duplicate, "The key " .. problem .. " stands twice") end
  local members = object.of
  local own = { status = "number", error = "string", session = "string", pos = "number" }
  for _, key in ipairs(object.keys) do
    local value = members[key]
    local kind = own[key] or meta_types[key]
    -- In the answer to HELLO `timing` and `boundaries` are arrays or objects of their own.
    if kind and value ~= null then
      if not fits(value, kind) then
        branch:add_proto_expert_info(e.meta_type, string.format("%s is %s", key, shown(value)))
      elseif key == "status" then
        if is_count(value) and value < 65536 then branch:add(f.status, range, value) end
      elseif own[key] then
        add_meta_item(branch, f[key], range, value, kind)
      else
        add_meta_item(branch, meta_fields[key], range, value, kind)
      end
    end
    if nested[key] and type(value) == "table" and value.of then
      for inner, inner_kind in pairs(nested[key]) do
        local inside = value.of[inner]
        if inside ~= nil and fits(inside, inner_kind) then
          add_meta_item(branch, nested_fields[key][inner], range, inside, inner_kind)
        end
      end
    end
  end
  -- It sets the columns, which are ours; the caller sets them again. It has read what our parser accepts, but a fault in
  -- it must not become one of ours.
  if json then pcall(json.call, json, range:tvb(), pinfo, branch) end
  return members, true
end

-- ---- Frames ----------------------------------------------------------------------------------------------------------

local function kind_of(flags, conv, pinfo)
  if conv.station then
    -- Stock-client mode: the station answers with FIN alone, and POISON of the client cancels.
    if conv.station == source(pinfo) then
      return any(flags, ACK, FORK, RACE, FOLD) and "control" or "response"
    elseif has(flags, RESPONSE) and not any(flags, ACK, FORK, RACE, FOLD) then return "cancel" end
  end
  if has(flags, RESPONSE) then return has(flags, VENT) and "failure" or "response" end
  if any(flags, ACK, FORK, RACE, FOLD) then return "control" end
  return has(flags, VENT) and "cancel" or "request"
end

-- One frame in `range`, whose header is there; `announced` is what its carrier says about its length. Returns a text.
local function dissect_frame(range, pinfo, root, conv, prefix)
  local header = range:range(0, HEADER_LEN)
  local raw = header:raw()
  local stream, sequence, flags, length = be(raw, 1, 2), be(raw, 3, 4), raw:byte(7), be(raw, 8, 3)
  local name = routes[stream] or string.format("route 0x%04x", stream)

  -- The first frame of a station in stock-client mode tells which side the station is.
  if is_tcp(pinfo) and stream == FORK_STREAM and flags == FORK and not conv.station then conv.station = source(pinfo) end
  local kind = kind_of(flags, conv, pinfo)
  local answer = kind == "response" or kind == "failure"

  local tree = root:add(aeon, prefix and prefix.range or range)
  if prefix then tree:add(f.prefix, prefix.range:range(0, PREFIX_LEN)) end
  tree:add(f.stream, header:range(0, 2))
  tree:add(f.route, header:range(0, 2), name):set_generated()
  tree:add(f.sequence, header:range(2, 4))
  local names = {}
  for _, bit in ipairs({ { FORK, "FORK" }, { RACE, "RACE" }, { FOLD, "FOLD" }, { VENT, "VENT" }, { FIN, "FIN" },
    { RESPONSE, "RESPONSE" }, { HELIX, "HELIX" }, { ACK, "ACK" } }) do
    if has(flags, bit[1]) then names[#names + 1] = bit[2] end
  end
  local flag_tree = tree:add(f.flags, header:range(6, 1))
  if #names > 0 then flag_tree:append_text(" (" .. table.concat(names, ", ") .. ")") end
  for _, key in ipairs({ "fork", "race", "fold", "vent", "fin", "response", "helix", "ack" }) do
    flag_tree:add(f[key], header:range(6, 1))
  end
  tree:add(f.length, header:range(7, 3))
  if conv.station then tree:add(f.stock, true):set_generated() end

  local available = range:len() - HEADER_LEN
  local frame = { stream = stream, sequence = sequence, length = length, sample = "" }
  local meta, body_text, whole = {}, nil, available >= length
  if not whole then tree:add_proto_expert_info(e.cut, string.format("%d of %d payload bytes", available, length)) end

  if stream == ACK_STREAM and has(flags, ACK) then
    body_text = acknowledged(tree, available > 0 and range:range(HEADER_LEN, math.min(available, length)) or nil)
  elseif kind == "control" then
    if stream == FORK_STREAM and flags == FORK then
      if length > 0 and whole then body_text = opened_streams(tree, range:range(HEADER_LEN, length)) end
    else
      tree:add_proto_expert_info(e.ignored)
      if available > 0 then tree:add(f.rest, range:range(HEADER_LEN, math.min(available, length))) end
    end
  elseif kind == "cancel" then
    tree:add_proto_expert_info(e.cancel)
    if length > 0 and available > 0 then tree:add(f.rest, range:range(HEADER_LEN, math.min(available, length))) end
  elseif length < 2 then
    if kind == "request" and length == 0 then tree:add_proto_expert_info(e.ignored, "A request with an empty payload")
    else tree:add_proto_expert_info(e.payload) end
  elseif available >= 2 then
    frame.sample = range:range(HEADER_LEN, math.min(available, length, 1024)):raw()
    local meta_len = be(frame.sample, 1, 2)
    tree:add(f.meta_len, range:range(HEADER_LEN, 2))
    if meta_len > length - 2 then
      tree:add_proto_expert_info(e.meta_len, string.format("The meta has %d bytes, but %d are left", meta_len, length - 2))
    elseif available >= 2 + meta_len then
      local readable = true
      if meta_len > 0 then meta, readable = dissect_meta(tree, range:range(HEADER_LEN + 2, meta_len), pinfo) end
      if not routes[stream] then tree:add_proto_expert_info(e.unknown) end
      if kind == "response" and conv.station and is_count(meta.status) and meta.status >= 400 then kind = "failure" end
      frame.session = type(meta.session) == "string" and meta.session or nil
      local model = type(meta.model) == "table" and meta.model.of
      if answer and is_count(meta.dim) and meta.dim > 0 then conv.dim = meta.dim
      elseif answer and stream == 0 and model and is_count(model.hidden_dim) and model.hidden_dim > 0 then
        conv.dim = model.hidden_dim
      end
      local body_len = length - 2 - meta_len
      tree:add(f.body_len, body_len):set_generated()
      local body_kind
      if kind == "response" then
        body_kind = type(meta.body) == "string" and meta.body or answer_bodies[stream]
      elseif kind == "request" then
        body_kind = request_bodies[stream]
        if stream == 3 and meta["in"] == "ids" then body_kind = "u32" end
      end
      if body_kind and (body_len > 0 or body_kind ~= "bwah") then
        tree:add(f.body_kind, body_kind):set_generated()
      end
      if body_len > 0 and whole then
        local body = range:range(HEADER_LEN + 2 + meta_len, body_len)
        local branch = tree:add(f.body, body)
        branch:set_text(string.format("Body: %s%s", plural(body_len, "byte"), body_kind and ", " .. body_kind or ""))
        if not readable then body_text = plural(body_len, "byte")
        elseif body_kind == "pcar" then body_text = pcar_body(branch, body)
        elseif body_kind == "qres" or quantised[body_kind] then body_text = qres_body(branch, body)
        elseif body_kind == "bwah" then body_text = bwah_body(branch, body, answer)
        elseif body_kind == "f32" or body_kind == "u32" or body_kind == "topk" or body_kind == "logits" then
          body_text = packed_body(branch, body, body_kind, conv, frame, meta, answer)
        else body_text = plural(body_len, "byte") end
      elseif body_len == 0 and kind == "request" and body_kind == "pcar" then
        tree:add_proto_expert_info(e.pcar, "Truncated: a body has at least one block")
      elseif body_len == 0 and kind == "request" and body_kind == "qres" then
        tree:add_proto_expert_info(e.qres, "Truncated: a body has at least one position")
      elseif body_len > 0 then
        body_text = plural(body_len, "byte") .. (body_kind and " of " .. body_kind or "")
      end
    end
  end
  tree:add(f.kind, kind):set_generated()

  local role
  if kind ~= "control" then
    role = exchange(pinfo, conv, kind, frame)
    show_exchange(tree, pinfo, kind, role)
  end

  -- One line that a person can read.
  local text = string.format("%s #%.0f", name, sequence)
  if kind == "request" then
    if frame.session then text = text .. " session " .. frame.session:sub(1, 24) end
    if meta.pos and type(meta.pos) == "number" then text = text .. " pos " .. shown(meta.pos) end
    if role and role.part == "copy" then text = text .. " (copy)" end
  elseif kind == "cancel" then
    text = text .. " cancel"
  elseif kind == "control" then
    text = text .. " [" .. table.concat(names, " ") .. "]"
  else
    local status = is_count(meta.status) and meta.status or (kind == "failure" and "failed" or 200)
    text = string.format("%s → %s", text, shown(status))
    if kind == "failure" then
      local reason = type(meta.error) == "string" and meta.error or statuses[meta.status] or ""
      text = text .. (reason ~= "" and " " .. reason:sub(1, 80) or "")
      tree:add_proto_expert_info(e.failure, string.format("%s answered %s%s", name, shown(status),
        reason ~= "" and ": " .. reason or ""))
    elseif status == 204 then
      tree:add_proto_expert_info(e.miss)
      text = text .. " miss"
    end
    if meta.pos and type(meta.pos) == "number" then text = text .. " pos " .. shown(meta.pos) end
  end
  if body_text then text = text .. " " .. body_text end
  if role and role.time then text = string.format("%s (%.3f ms)", text, role.time * 1000) end
  tree:set_text("aeon-flow, " .. text)
  return text
end

-- Several calls for one packet (frames that end in it) share the Info column.
local function set_columns(pinfo, texts)
  pinfo.cols.protocol = "aeon-flow"
  local text = table.concat(texts, " | ")
  if pinfo.private["aeonflow"] then text = " | " .. text end
  pinfo.cols.info:set(text)
  pinfo.cols.info:fence()
  pinfo.private["aeonflow"] = "1"
end

local function bad_rest(range, root, expert_item, text)
  local tree = root:add(aeon, range)
  tree:set_text("aeon-flow, " .. text)
  tree:add(f.rest, range)
  tree:add_proto_expert_info(expert_item, text)
  return text
end

local function dissect_datagram(tvb, pinfo, root, conv)
  local len, reported = tvb:captured_len(), tvb:reported_len()
  if len < HEADER_LEN then
    return bad_rest(tvb:range(0), root, len < reported and e.cut or e.length,
      string.format("datagram of %s, a header has 10", plural(reported, "byte")))
  end
  local length = tvb:range(7, 3):uint()
  local taken = math.min(len, HEADER_LEN + length)
  local text = dissect_frame(tvb:range(0, taken), pinfo, root, conv)
  if reported ~= HEADER_LEN + length then
    local problem = string.format("datagram of %s, its header announces %d", plural(reported, "byte"), HEADER_LEN + length)
    bad_rest(tvb:range(taken < len and taken or 0), root, e.length, problem)
    text = text .. " [" .. problem .. "]"
  end
  return text
end

-- Whether a header with `flags` may begin a frame of a conversation that is not known yet. `s` begins with the header and
-- holds at least 13 bytes, unless the frame ends before.
local function is_plausible(s)
  if #s < HEADER_LEN then return false end
  local stream, flags, length = be(s, 1, 2), s:byte(7), be(s, 8, 3)
  if stream == FORK_STREAM then return flags == FORK and length > 0 and length % 2 == 0 and length <= 256 end
  if length == 0 then return flags == VENT and routes[stream] ~= nil and stream < FORK_STREAM end
  if flags ~= 0 and flags ~= FIN and flags ~= VENT and flags ~= FIN + RESPONSE and flags ~= VENT + FIN + RESPONSE then
    return false
  end
  if length < 2 or #s < 12 then return false end
  local meta_len = be(s, 11, 2)
  if meta_len > length - 2 then return false end
  -- Without a meta there is little to go by.
  if meta_len == 0 then return routes[stream] ~= nil and (stream > 0 or flags ~= 0) and stream < FORK_STREAM end
  return meta_len >= 2 and s:sub(13, 13) == "{"
end

local function prefix_fits(s)
  return #s >= PREFIX_LEN + HEADER_LEN and be(s, 1, 4) == HEADER_LEN + be(s, 12, 3)
end

local function framing_of(conv, s)
  if aeon.prefs.framing ~= DETECT then return aeon.prefs.framing end
  if not conv.framing then
    if prefix_fits(s) then conv.framing = PREFIXED
    elseif is_plausible(s) then conv.framing = BARE end
  end
  -- What cannot be told yet is read with prefixes, so that the fault shows.
  return conv.framing or PREFIXED
end

local function dissect_stream(tvb, pinfo, root, conv)
  local len, at, texts = tvb:captured_len(), 0, {}
  local cut = len < tvb:reported_len()
  local function wait(more)
    if cut or pinfo.can_desegment == 0 then return false end
    pinfo.desegment_offset = at
    pinfo.desegment_len = more
    return true
  end
  while at < len do
    local rest = tvb:range(at)
    local s = rest:range(0, math.min(rest:len(), 32)):raw()
    local bare = framing_of(conv, s) == BARE
    local before = bare and 0 or PREFIX_LEN
    local fault
    if not bare and #s >= PREFIX_LEN then
      local prefix = be(s, 1, 4)
      if prefix < HEADER_LEN then fault = { e.length, string.format("frame length %d, a header has 10", prefix) }
      elseif prefix > MAX_FRAME then fault = { e.oversize, string.format("frame length %.0f", prefix) }
      elseif #s >= PREFIX_LEN + HEADER_LEN and not prefix_fits(s) then
        fault = { e.length, string.format("frame length %.0f, its header announces %d", prefix, HEADER_LEN + be(s, 12, 3)) }
      end
    end
    if fault then
      -- A station reads no further on such a connection; in a capture with lost segments the next one may fit again.
      texts[#texts + 1] = bad_rest(rest, root, fault[1], fault[2])
      break
    end
    if #s < before + HEADER_LEN then
      if not wait(DESEGMENT_ONE_MORE_SEGMENT) then
        texts[#texts + 1] = bad_rest(rest, root, e.cut, "begin of a frame")
      end
      break
    end
    local size = before + HEADER_LEN + be(s, before + 8, 3)
    if rest:len() < size and wait(size - rest:len()) then break end
    local taken = math.min(size, rest:len())
    local prefix = not bare and { range = rest:range(0, taken) } or nil
    texts[#texts + 1] = dissect_frame(rest:range(before, taken - before), pinfo, root, conv, prefix)
    at = at + taken
  end
  return texts
end

function aeon.dissector(tvb, pinfo, root)
  if tvb:captured_len() == 0 then return 0 end
  local conv = conversation(pinfo)
  local texts
  if is_tcp(pinfo) then texts = dissect_stream(tvb, pinfo, root, conv)
  else texts = { dissect_datagram(tvb, pinfo, root, conv) } end
  if #texts > 0 then set_columns(pinfo, texts) end
  return tvb:captured_len()
end

local function recognised_udp(tvb, pinfo, root)
  local len = tvb:captured_len()
  if not aeon.prefs.heuristics or len < HEADER_LEN then return false end
  local s = tvb:range(0, math.min(len, 32)):raw()
  if tvb:reported_len() ~= HEADER_LEN + be(s, 8, 3) or not is_plausible(s) then return false end
  pinfo.conversation = aeon
  aeon.dissector(tvb, pinfo, root)
  return true
end

local function recognised_tcp(tvb, pinfo, root)
  local len = tvb:captured_len()
  if not aeon.prefs.heuristics or len < HEADER_LEN then return false end
  local s = tvb:range(0, math.min(len, 32)):raw()
  local prefixed = prefix_fits(s) and is_plausible(s:sub(PREFIX_LEN + 1))
  -- A bare frame is taken only with a meta, and only if it ends with the segment or behind it.
  local bare = #s >= 13 and s:sub(13, 13) == "{" and is_plausible(s)
  if aeon.prefs.framing == PREFIXED then bare = false elseif aeon.prefs.framing == BARE then prefixed = false end
  if not prefixed and not bare then return false end
  pinfo.conversation = aeon
  aeon.dissector(tvb, pinfo, root)
  return true
end

-- ---- Fragmented UDP ----------------------------------------------------------------------------------------------------

-- Joins the parts of a frame when they are first seen. Returns the finished or growing set that this packet belongs to.
local function join(pinfo, conv, id, index, total, part)
  local known = joined[pinfo.number]
  if known or pinfo.visited then return known end
  local key = conv.key .. " " .. source(pinfo) .. " " .. id
  local set = joining[key]
  local function add(number, place, bytes)
    if set.parts[place] then return end
    set.parts[place], set.numbers[place] = bytes, number
    set.count = set.count + 1
    if set.count == total then
      local all = {}
      for i = 0, total - 1 do all[i + 1] = set.parts[i] end
      set.whole, set.bytes = number, table.concat(all)
    end
  end
  if set and set.whole and set.total == total and set.parts[index] == part then
    -- A part that came twice, or the first part with equal bytes of another frame: what follows tells.
    set.late[#set.late + 1] = { number = pinfo.number, index = index }
  else
    -- Ids wrap and a sender that is started again counts from 0: another total, or a frame that is whole, is another frame.
    if not set or set.total ~= total or set.whole then
      local late, old = set and set.total == total and set.late or {}, set
      set = { total = total, count = 0, parts = {}, numbers = {}, late = {} }
      joining[key] = set
      for _, one in ipairs(late) do
        add(one.number, one.index, old.parts[one.index])
        joined[one.number] = set
      end
    end
    add(pinfo.number, index, part)
  end
  joined[pinfo.number] = set
  return set
end

function fragments.dissector(tvb, pinfo, root)
  local len = tvb:captured_len()
  local tree = root:add(fragments, tvb:range(0))
  pinfo.cols.protocol = "aeon-flow frag"
  if len < 4 then
    tree:add_proto_expert_info(e.fragment, "fewer than 4 bytes")
    pinfo.cols.info:set("datagram of " .. plural(len, "byte"))
    return len
  end
  local id, index, total = tvb:range(0, 2):uint(), tvb:range(2, 1):uint(), tvb:range(3, 1):uint()
  tree:add(g.id, tvb:range(0, 2))
  tree:add(g.index, tvb:range(2, 1))
  tree:add(g.total, tvb:range(3, 1))
  local text = string.format("frame %d, part %d of %d", id, index, total)
  tree:set_text("aeon-flow fragment, " .. text)
  if len > 4 then tree:add(g.part, tvb:range(4)) end
  if index >= total or len == 4 then
    tree:add_proto_expert_info(e.fragment, len == 4 and "a part without bytes" or "no such part: " .. text)
    pinfo.cols.info:set(text .. " [dropped]")
    return len
  end
  if len < tvb:reported_len() then
    tree:add_proto_expert_info(e.cut)
    pinfo.cols.info:set(text)
    return len
  end
  local conv = conversation(pinfo)
  -- A frame of one part stands for itself.
  local set = total > 1 and join(pinfo, conv, id, index, total, tvb:range(4):raw()) or nil
  if total == 1 or set and set.whole == pinfo.number then
    local whole
    if set then
      for i = 0, total - 1 do tree:add(g.part_in, set.numbers[i]):set_generated() end
      whole = ByteArray.new(set.bytes, true):tvb("Joined aeon-flow frame")
    else whole = tvb:range(4):tvb() end
    local inner = dissect_datagram(whole, pinfo, root, conv)
    pinfo.cols.protocol = "aeon-flow"
    pinfo.cols.info:set(inner .. (total > 1 and string.format(" [%d parts]", total) or ""))
  else
    if set and set.whole then tree:add(g.whole_in, set.whole):set_generated() end
    pinfo.cols.info:set(text)
  end
  return len
end

-- ---- Registration ------------------------------------------------------------------------------------------------------

local udp_table, tcp_table = DissectorTable.get("udp.port"), DissectorTable.get("tcp.port")
udp_table:add_for_decode_as(aeon)
tcp_table:add_for_decode_as(aeon)
udp_table:add_for_decode_as(fragments)
aeon:register_heuristic("udp", recognised_udp)
aeon:register_heuristic("tcp", recognised_tcp)

local registered = {}
local function register(ports, table_of, proto, slot)
  ports = tostring(ports or "")
  if registered[slot] == ports then return end
  if registered[slot] and registered[slot] ~= "" then table_of:remove(registered[slot], proto) end
  if ports ~= "" then table_of:add(ports, proto) end
  registered[slot] = ports
end
local function register_all()
  register(aeon.prefs.udp_ports, udp_table, aeon, "udp")
  register(aeon.prefs.tcp_ports, tcp_table, aeon, "tcp")
  register(aeon.prefs.fragment_ports, udp_table, fragments, "fragments")
end
aeon.prefs_changed = register_all
register_all()
