//! Requests of a connection: handled at once, in flight at a worker, or parked until there is room.

use std::{
    io,
    task::{Context, Poll},
    time::Instant,
};

use aeon_proto::{
    frame::{Flags, Frame, HEADER_LEN, Kind, PREFIX_LEN},
    route::Route,
};
use tokio::sync::mpsc;

use super::{Connection, output::patch_prefix, socket::StreamSocket};
use crate::{
    codec::Framing,
    model::CancelToken,
    station::{
        error::RequestError,
        request::{Outcome, ReplyTo, Request},
    },
};

/// The stream id on which a stock client is told the opcodes.
const OPEN_STREAMS_ID: u16 = 0xfffe;

/// A request that waits for the model.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) id: u64,
    pub(super) stream_id: u16,
    pub(super) sequence: u32,
    pub(super) cancel: CancelToken,
}

/// A request that waits for one in flight to end.
#[derive(Debug)]
pub(super) struct Parked {
    pub(super) stream_id: u16,
    pub(super) sequence: u32,
    pub(super) flags: Flags,
    pub(super) payload: Vec<u8>,
    pub(super) arrived: Instant,
}

/// Both ends of the way of answers from workers to their connection.
pub(super) type Done = (mpsc::UnboundedSender<Completion>, mpsc::UnboundedReceiver<Completion>);

/// The answer of a worker.
#[derive(Debug)]
pub(super) struct Completion {
    id: u64,
    pub(super) frame: Option<Vec<u8>>,
    /// When the answer was there.
    pub(super) ready: Instant,
}

struct StreamReply {
    id: u64,
    done: mpsc::UnboundedSender<Completion>,
}

impl ReplyTo for StreamReply {
    fn finish(self: Box<Self>, frame: Option<Vec<u8>>) {
        // A connection that is gone needs no answer.
        let _ = self.done.send(Completion { id: self.id, frame, ready: Instant::now() });
    }
}

impl<S: StreamSocket> Connection<S> {
    pub(super) fn frame(&mut self, frame: Frame<'_>, now: Instant) {
        self.frames += 1;
        let dropped = &self.station.counters().dropped;
        match frame.flags.kind() {
            Kind::Request if frame.payload.is_empty() => dropped.empty.add_one(),
            Kind::Request if self.in_flight.len() >= self.options.max_in_flight || !self.parked.is_empty() => {
                self.parked_bytes += frame.encoded_len();
                let Frame { stream_id, sequence, flags, payload } = frame;
                self.parked.push_back(Parked { stream_id, sequence, flags, payload: payload.to_vec(), arrived: now });
            }
            Kind::Request => self.request(frame, now),
            Kind::Cancel if !self.station.admits_cancel(self.peer.carrier, &frame) => {}
            Kind::Cancel => self.cancel(frame.stream_id, frame.sequence),
            Kind::NeverAnswered if self.options.stock_clients && is_poison(frame.flags) => {
                if self.station.admits_cancel(self.peer.carrier, &frame) {
                    self.cancel(frame.stream_id, frame.sequence);
                }
            }
            Kind::NeverAnswered => dropped.never_answered.add_one(),
        }
    }

    pub(super) fn request(&mut self, frame: Frame<'_>, arrived: Instant) {
        self.last_request = arrived;
        let start = self.output.len();
        self.output.extend_from_slice(&[0; PREFIX_LEN][..self.options.framing.prefix_len()]);
        let id = self.next_id;
        self.next_id += 1;
        let Self { done, station, output, .. } = self;
        let request = Request { peer: &self.peer, frame, arrived };
        let reply_to = || -> Box<dyn ReplyTo> {
            let (done, _) = done.get_or_insert_with(mpsc::unbounded_channel);
            Box::new(StreamReply { id, done: done.clone() })
        };
        match station.handle(request, output, reply_to) {
            Outcome::Replied => {
                self.ready_since.get_or_insert_with(Instant::now);
                patch_prefix(&mut self.output, start, self.options.framing);
            }
            Outcome::Queued(cancel) => {
                self.output.truncate(start);
                let Frame { stream_id, sequence, .. } = frame;
                self.in_flight.push(InFlight { id, stream_id, sequence, cancel });
            }
            Outcome::Silent => self.output.truncate(start),
        }
    }

    /// Withdraws what is in flight under this stream id and sequence; a stock client cancels a whole stream.
    pub(super) fn cancel(&mut self, stream_id: u16, sequence: u32) {
        let whole_stream = self.options.stock_clients;
        let hit = |id: u16, seq: u32| id == stream_id && (whole_stream || seq == sequence);
        let mut found = false;
        for request in self.in_flight.iter().filter(|request| hit(request.stream_id, request.sequence)) {
            request.cancel.cancel();
            found = true;
        }
        let parked = std::mem::take(&mut self.parked);
        for request in parked {
            if hit(request.stream_id, request.sequence) {
                found = true;
                self.parked_bytes -= HEADER_LEN + request.payload.len();
                self.vent(&RequestError::Cancelled, request.stream_id, request.sequence);
            } else {
                self.parked.push_back(request);
            }
        }
        if !found {
            self.station.counters().dropped.idle_cancel.add_one();
        }
    }

    pub(super) fn complete(&mut self, done: Completion) {
        self.in_flight.retain(|request| request.id != done.id);
        self.last_request = Instant::now();
        if let Some(frame) = done.frame {
            if self.options.framing == Framing::Prefixed {
                self.output.extend_from_slice(&(frame.len() as u32).to_be_bytes());
            }
            self.output.extend_from_slice(&frame);
            let ready = self.ready_since.get_or_insert(done.ready);
            *ready = done.ready.min(*ready);
        }
    }

    /// Waits for the answer of a worker.
    pub(super) fn poll_completion(&mut self, cx: &mut Context<'_>) -> Poll<Completion> {
        let Some((_, answers)) = &mut self.done else { return Poll::Pending };
        // The other end is here too, so there is no end of answers.
        match answers.poll_recv(cx) {
            Poll::Ready(Some(done)) => Poll::Ready(done),
            Poll::Ready(None) | Poll::Pending => Poll::Pending,
        }
    }

    /// Takes an answer and all that have come with it, and goes on with what waited for them.
    pub(super) fn completed(&mut self, done: Completion) -> io::Result<()> {
        self.with_output(|connection| {
            connection.complete(done);
            while let Some(done) = connection.done.as_mut().and_then(|(_, answers)| answers.try_recv().ok()) {
                connection.complete(done);
            }
            connection.unpark();
        })
    }

    /// Handles parked requests as far as there is room for them in flight.
    pub(super) fn unpark(&mut self) {
        while self.in_flight.len() < self.options.max_in_flight
            && !self.parked.is_empty()
            && !self.is_full()
            && let Some(Parked { stream_id, sequence, flags, payload, arrived }) = self.parked.pop_front()
        {
            let frame = Frame { stream_id, sequence, flags, payload: &payload };
            self.parked_bytes -= frame.encoded_len();
            self.request(frame, arrived);
        }
    }

    pub(super) fn vent(&mut self, error: &RequestError, stream_id: u16, sequence: u32) {
        let start = self.output.len();
        self.output.extend_from_slice(&[0; PREFIX_LEN][..self.options.framing.prefix_len()]);
        error.write_vent(stream_id, sequence, self.peer.reply_flags(false), &mut self.output);
        patch_prefix(&mut self.output, start, self.options.framing);
        self.station.counters().errors.add_one();
        self.station.counters().faults.of(error.fault()).add_one();
    }

    /// Lists the route opcodes for clients that can only send on streams that were opened to them.
    pub(super) fn open_streams(&mut self) {
        let start = self.output.len();
        self.output.extend_from_slice(&[0; PREFIX_LEN][..self.options.framing.prefix_len()]);
        let mut payload = Vec::new();
        for route in Route::ALL {
            payload.extend_from_slice(&route.0.to_be_bytes());
        }
        let frame = Frame { stream_id: OPEN_STREAMS_ID, sequence: 0, flags: Flags::FORK, payload: &payload };
        // Thirty bytes always fit.
        let _ = frame.encode(&mut self.output);
        patch_prefix(&mut self.output, start, self.options.framing);
    }
}

/// Whether a stock client's frame withdraws its stream: POISON, and none of the flags that make it something else.
fn is_poison(flags: Flags) -> bool {
    flags.contains(Flags::RESPONSE) && !flags.intersects(Flags::ACK | Flags::FORK | Flags::RACE | Flags::FOLD)
}
