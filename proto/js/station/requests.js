// Why a request is not done: a status, the text for its sender, and the fields that go with it.

/** The longest error text that a peer gets, in bytes. */
const MAX_TEXT = 300;

export class Vent extends Error {
  constructor(status, message, fields = {}) {
    super(message);
    this.status = status;
    this.fields = fields;
  }

  get name() {
    return 'Vent';
  }

  /** The meta of the frame. */
  get meta() {
    return { status: this.status, error: cut(this.message), ...this.fields };
  }
}

function cut(text) {
  const bytes = Buffer.from(text);
  if (bytes.length <= MAX_TEXT) return text;
  let end = MAX_TEXT;
  // Not inside a character: its later bytes are 10xxxxxx.
  while ((bytes[end] & 0xc0) === 0x80) end -= 1;
  return bytes.toString('utf8', 0, end);
}
