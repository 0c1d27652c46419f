// Why a request is not done: a status, the text for its sender, and the fields that go with it.

/** The longest error text that a peer gets. */
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
    const text = this.message.length > MAX_TEXT ? [...this.message].slice(0, MAX_TEXT - 20).join('') : this.message;
    return { status: this.status, error: text, ...this.fields };
  }
}
