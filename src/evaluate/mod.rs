//! What a form of residuals costs a model: bytes, fidelity at each boundary, and above all the model's output.
//!
//! A text is run through a [`mesh`] whose residuals pass through a [`codec`] at each boundary, and through the same mesh
//! without one; [`run`] compares the two, position by position, and [`report`] holds what came out. `aeonctl evaluate`,
//! `basis fit` and `generate --wire auto` call this. It knows no wire and no command line.
//!
//! Rules of judging, the same for all codecs:
//!
//! - Every position of a text passes through the codec, the prompt's as well, so that damaged keys and values count.
//! - Judged are all positions of a window but the first (which every model treats in a way of its own) and the last (whose
//!   next token is not in the text).
//! - Figures of reconstruction are about ordinary positions: not position 0, and none whose norm is over four times the
//!   median, since a handful of those would be most of any sum. The effect on the output is about all of them.

pub mod calibrate;
pub mod choose;
pub mod codec;
pub mod error;
pub mod judge;
pub mod live;
mod logits;
pub mod mesh;
pub mod report;
pub mod run;
mod tally;
pub mod text;

pub use codec::{BodyCodec, Setting};
pub use error::EvaluateError;
pub use mesh::{Mesh, MeshInfo, Slot, Split};
pub use report::Report;
pub use run::{Options, evaluate};
