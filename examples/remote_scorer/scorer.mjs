// A reward in another language: `node scorer.mjs [port]`, named in a job file as {type: grpc, url: grpc://host:port}.
//
// It needs no package: gRPC is HTTP/2 with a five-byte frame, a request has one field to read, and its samples are
// msgpack. A scorer with a gRPC and a msgpack library of its language is `reward` below and nothing else.
import http2 from "node:http2";

// The reward: 1 where the right answer stands in the response, with the number of tokens beside it.
function reward(sample) {
  if (typeof sample.response !== "string") throw new Refusal(`sample ${sample.id} has no response`);
  if (sample.ground_truth == null) {
    // Not 0: the sample could not be scored, and is left out of the step.
    return { id: sample.id, score: null, parts: {}, error_type: "none", error: "no ground_truth", seconds: 0 };
  }
  const score = sample.response.includes(String(sample.ground_truth)) ? 1 : 0;
  const parts = { tokens: sample.response_ids.length };
  return { id: sample.id, score, parts, error_type: "", error: "", seconds: 0 };
}

class Refusal extends Error {} // of this request: the job ends with its text, where another failure is tried again

const INVALID_ARGUMENT = 3;
const UNIMPLEMENTED = 12;
const INTERNAL = 13;

const methods = {
  "/nightshift.wire.v1.ScorerService/Describe": () =>
    Buffer.concat([bytesField(1, Buffer.from("reward")), bytesField(2, Buffer.from("scorer.mjs"))]),
  "/nightshift.wire.v1.ScorerService/Score": (request) => {
    const began = performance.now();
    let samples;
    try {
      samples = unpack(fields(request)[2] ?? Buffer.alloc(0)); // ScoreRequest.samples
    } catch (error) {
      throw new Refusal(`the samples cannot be read: ${error.message}`);
    }
    const results = pack(samples.map(reward)); // one for each, in their order
    const seconds = Buffer.alloc(9, 0x11); // ScoreResponse.seconds: field 2, eight bytes
    seconds.writeDoubleLE((performance.now() - began) / 1000, 1);
    return Buffer.concat([bytesField(1, results), seconds]); // ScoreResponse.results
  },
};

// gRPC over HTTP/2 -----------------------------------------------------------------------------------------------------

const server = http2.createServer();
server.on("stream", (stream, headers) => {
  const chunks = [];
  stream.on("error", () => {}); // the caller went away
  stream.on("data", (chunk) => chunks.push(chunk));
  stream.on("end", () => {
    const head = { ":status": 200, "content-type": "application/grpc" };
    try {
      const method = methods[headers[":path"]];
      if (!method) return fail(UNIMPLEMENTED, `no method ${headers[":path"]}`);
      const body = method(Buffer.concat(chunks).subarray(5)); // one byte "compressed", four of the length
      const frame = Buffer.alloc(5);
      frame.writeUInt32BE(body.length, 1);
      stream.respond(head, { waitForTrailers: true });
      stream.on("wantTrailers", () => stream.sendTrailers({ "grpc-status": "0" }));
      stream.end(Buffer.concat([frame, body]));
    } catch (error) {
      fail(error instanceof Refusal ? INVALID_ARGUMENT : INTERNAL, error.message);
    }
    function fail(code, text) {
      stream.respond({ ...head, "grpc-status": String(code), "grpc-message": encodeURIComponent(text) }, { endStream: true });
    }
  });
});
server.listen(Number(process.argv[2] ?? 0), "127.0.0.1", () => console.log(server.address().port));

// protobuf -------------------------------------------------------------------------------------------------------------

// The length-delimited fields of a message by number.
function fields(message) {
  const found = {};
  let at = 0;
  const varint = () => {
    let value = 0;
    for (let shift = 1; ; shift *= 128) {
      const byte = message.readUInt8(at++);
      value += (byte & 127) * shift;
      if (byte < 128) return value;
    }
  };
  while (at < message.length) {
    const tag = varint();
    const kind = tag & 7;
    if (kind === 0) varint();
    else if (kind === 1) at += 8;
    else if (kind === 5) at += 4;
    else {
      const size = varint();
      found[tag >> 3] = message.subarray(at, (at += size));
    }
  }
  return found;
}

function bytesField(number, value) {
  const head = [number * 8 + 2];
  let size = value.length;
  for (; size > 127; size = Math.floor(size / 128)) head.push((size % 128) + 128);
  return Buffer.concat([Buffer.from([...head, size]), value]);
}

// msgpack --------------------------------------------------------------------------------------------------------------

function unpack(data) {
  let at = 0;
  const big = (value) => (Number.isSafeInteger(Number(value)) ? Number(value) : value);
  const read = (method, size) => data[method]((at += size) - size);
  const take = (size) => {
    if (at + size > data.length) throw new RangeError("it ends too early");
    return data.subarray(at, (at += size));
  };
  const list = (size) => Array.from({ length: size }, value);
  const map = (size) => Object.fromEntries(Array.from({ length: size }, () => [value(), value()]));
  const text = (size) => take(size).toString("utf8");
  function extension(size) {
    const kind = read("readInt8", 1);
    if (kind !== 1) throw new TypeError(`unknown extension ${kind}`);
    return array(...unpack(take(size))); // [dtype, shape, bytes]
  }
  function value() {
    const tag = read("readUInt8", 1);
    if (tag < 0x80) return tag;
    if (tag < 0x90) return map(tag & 15);
    if (tag < 0xa0) return list(tag & 15);
    if (tag < 0xc0) return text(tag & 31);
    if (tag >= 0xe0) return tag - 256;
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return take(read("readUInt8", 1));
      case 0xc5: return take(read("readUInt16BE", 2));
      case 0xc6: return take(read("readUInt32BE", 4));
      case 0xc7: return extension(read("readUInt8", 1));
      case 0xc8: return extension(read("readUInt16BE", 2));
      case 0xc9: return extension(read("readUInt32BE", 4));
      case 0xca: return read("readFloatBE", 4);
      case 0xcb: return read("readDoubleBE", 8);
      case 0xcc: return read("readUInt8", 1);
      case 0xcd: return read("readUInt16BE", 2);
      case 0xce: return read("readUInt32BE", 4);
      case 0xcf: return big(read("readBigUInt64BE", 8));
      case 0xd0: return read("readInt8", 1);
      case 0xd1: return read("readInt16BE", 2);
      case 0xd2: return read("readInt32BE", 4);
      case 0xd3: return big(read("readBigInt64BE", 8));
      case 0xd4: case 0xd5: case 0xd6: case 0xd7: case 0xd8: return extension(1 << (tag - 0xd4));
      case 0xd9: return text(read("readUInt8", 1));
      case 0xda: return text(read("readUInt16BE", 2));
      case 0xdb: return text(read("readUInt32BE", 4));
      case 0xdc: return list(read("readUInt16BE", 2));
      case 0xdd: return list(read("readUInt32BE", 4));
      case 0xde: return map(read("readUInt16BE", 2));
      case 0xdf: return map(read("readUInt32BE", 4));
      default: throw new TypeError(`no value begins with ${tag}`);
    }
  }
  return value();
}

// The numbers of an array; of its shape only that it is flat, as response_ids is.
function array(dtype, shape, bytes) {
  if (dtype !== "<i4" || shape.length !== 1) throw new TypeError(`array of ${dtype} with ${shape.length} axes`);
  return Array.from({ length: shape[0] }, (_, at) => bytes.readInt32LE(4 * at));
}

function pack(value) {
  const sized = (tag, size) => Buffer.from([tag, size >>> 24, (size >>> 16) & 255, (size >>> 8) & 255, size & 255]);
  if (value === null || value === undefined) return Buffer.from([0xc0]);
  if (typeof value === "boolean") return Buffer.from([value ? 0xc3 : 0xc2]);
  if (typeof value === "number") {
    const bytes = Buffer.alloc(9, 0xcb);
    bytes.writeDoubleBE(value, 1);
    return bytes;
  }
  if (typeof value === "string") {
    const bytes = Buffer.from(value, "utf8");
    return Buffer.concat([sized(0xdb, bytes.length), bytes]);
  }
  if (Array.isArray(value)) return Buffer.concat([sized(0xdd, value.length), ...value.map(pack)]);
  const entries = Object.entries(value);
  return Buffer.concat([sized(0xdf, entries.length), ...entries.flatMap(([name, item]) => [pack(name), pack(item)])]);
}
