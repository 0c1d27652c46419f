//! PCA components and quantised residuals on the wire: the checks, the results, falling back to raw, a rolling change of basis, and basis files
//! that are destroyed under a running node.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test stops at its first failure")]

mod checks;
mod disk;
mod fallback;
mod proxy;
mod quantised;
mod random;
mod results;
mod rolling;
mod support;
