//! Lift and projection between a residual and its PCA components. Spec: `proto/SPEC.md`, "Arithmetic".
//!
//! ```text
//! lift      y[j] = mean[j] + c[0]*B[0][j] + c[1]*B[1][j] + …     from left to right
//! project   c[i] = sum over j of B[i][j] * (r[j] - mean[j])      sixteen partial sums over j mod 16, then a fixed tree
//! ```
//!
//! Both give **the same bits everywhere**: every operation is rounded to f32, nothing is fused and the order is fixed.
//! The station lifts what FORWARD_PCA brings and projects what a client accepts; a client does the reverse.
//!
//! Shapes: `mean` is `[d]`, `basis` `[k, d]` row-major (one row a component), components `[n, k]`, residuals `[n, d]`;
//! `n` is 1 for the functions without `batch` in their name. `d` is the length of `mean`, `k` follows from the basis; to
//! lift a prefix of the components, pass the same prefix of the rows. Slices need no alignment beyond that of f32.
//! Nothing is allocated and nothing panics.
//!
//! NaN and infinity are not looked for. By the specification the caller refuses them before and after, with
//! [`crate::residual::check_finite_values`]: finite components can still overflow in a lift.
//!
//! The free functions pick the fastest path that the processor has, once. The choice needs the feature `std`; without
//! it, and on other processors, loops that the compiler vectorises are used. [`Kernel`] names a path explicitly.

mod reference;
mod tile;
#[cfg(all(feature = "std", target_arch = "x86_64"))]
mod x86;

/// Slices whose lengths do not fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[cfg_attr(feature = "js", derive(serde::Serialize))]
pub enum ShapeError {
    /// The mean has no values, so there is no width.
    #[error("mean of width 0")]
    NoWidth,
    /// The basis is no whole number of rows.
    #[error("basis of {got} values is no whole number of rows of {d}")]
    Basis {
        /// Values of the basis.
        got: usize,
        /// Values of a row.
        d: usize,
    },
    /// The residuals are no whole number of positions.
    #[error("{got} residual values are no whole number of positions of {d}")]
    Residuals {
        /// Values given.
        got: usize,
        /// Values of a position.
        d: usize,
    },
    /// The components are not one for each row and position.
    #[error("{got} components where {positions} positions of {k} are expected")]
    Components {
        /// Components given, or room given for them.
        got: usize,
        /// Positions, by the residuals.
        positions: usize,
        /// Components of a position, by the basis.
        k: usize,
    },
    /// More than one position given to a function for one.
    #[error("{got} positions where one is expected")]
    Positions {
        /// Positions, by the residuals.
        got: usize,
    },
}

/// Writes `mean + components * basis` to `out`: one position.
///
/// # Errors
/// [`ShapeError`] if the lengths do not fit together; `out` is unchanged then.
///
/// # Examples
/// ```
/// let (mean, basis) = ([1.0, 2.0, 3.0], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
/// let mut out = [0.0; 3];
/// aeon_proto::kernel::lift(&mean, &basis, &[0.5, -1.0], &mut out)?;
/// assert_eq!(out, [1.5, 2.0, 2.0]);
/// # Ok::<(), aeon_proto::kernel::ShapeError>(())
/// ```
pub fn lift(mean: &[f32], basis: &[f32], components: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
    Kernel::detect().lift(mean, basis, components, out)
}

/// Writes `mean + components * basis` to `out` for each position: `components` is `[n, k]`, `out` `[n, d]`.
///
/// # Errors
/// [`ShapeError`] if the lengths do not fit together; `out` is unchanged then.
pub fn lift_batch(mean: &[f32], basis: &[f32], components: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
    Kernel::detect().lift_batch(mean, basis, components, out)
}

/// Writes the components of `residual - mean` to `out`: one position.
///
/// # Errors
/// [`ShapeError`] if the lengths do not fit together; `out` is unchanged then.
pub fn project(mean: &[f32], basis: &[f32], residual: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
    Kernel::detect().project(mean, basis, residual, out)
}

/// Writes the components of `residual - mean` to `out` for each position: `residuals` is `[n, d]`, `out` `[n, k]`.
///
/// # Errors
/// [`ShapeError`] if the lengths do not fit together; `out` is unchanged then.
pub fn project_batch(mean: &[f32], basis: &[f32], residuals: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
    Kernel::detect().project_batch(mean, basis, residuals, out)
}

/// One way to compute the two sums. All give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kernel(Path);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    Reference,
    Portable,
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    Avx2(x86::Avx2),
    #[cfg(all(feature = "std", target_arch = "x86_64"))]
    Avx512(x86::Avx512),
}

/// A lift whose lengths were checked: `basis` is `[k, d]`, `components` `[n, k]`, `out` `[n, d]`, all of d, k and n over 0.
struct Lift<'a> {
    mean: &'a [f32],
    basis: &'a [f32],
    components: &'a [f32],
    out: &'a mut [f32],
    k: usize,
    n: usize,
}

/// A projection whose lengths were checked: `basis` is `[k, d]`, `residuals` `[n, d]`, `out` `[n, k]`, all of d, k and n
/// over 0.
struct Project<'a> {
    mean: &'a [f32],
    basis: &'a [f32],
    residuals: &'a [f32],
    out: &'a mut [f32],
    k: usize,
    n: usize,
}

impl Kernel {
    /// The definition, one value at a time. For tests and for reading.
    pub const REFERENCE: Self = Self(Path::Reference);
    /// Loops that the compiler vectorises for the target it builds for.
    pub const PORTABLE: Self = Self(Path::Portable);

    /// The fastest path of this processor, looked for once.
    #[must_use]
    pub fn detect() -> Self {
        #[cfg(all(feature = "std", target_arch = "x86_64"))]
        {
            static BEST: std::sync::OnceLock<Kernel> = std::sync::OnceLock::new();
            *BEST.get_or_init(|| Self::available().next().unwrap_or(Self::PORTABLE))
        }
        #[cfg(not(all(feature = "std", target_arch = "x86_64")))]
        Self::PORTABLE
    }

    /// All paths that this processor has, the fastest first, [`Self::REFERENCE`] last.
    pub fn available() -> impl Iterator<Item = Self> {
        #[cfg(all(feature = "std", target_arch = "x86_64"))]
        let vector = [x86::Avx512::detect().map(Path::Avx512), x86::Avx2::detect().map(Path::Avx2)];
        #[cfg(not(all(feature = "std", target_arch = "x86_64")))]
        let vector = [None::<Path>; 0];
        vector.into_iter().flatten().map(Self).chain([Self::PORTABLE, Self::REFERENCE])
    }

    /// A short name for logs and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self.0 {
            Path::Reference => "reference",
            Path::Portable => "portable",
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx2(_) => "avx2",
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx512(_) => "avx512",
        }
    }

    /// [`lift`] by this path.
    ///
    /// # Errors
    /// [`ShapeError`] if the lengths do not fit together.
    pub fn lift(self, mean: &[f32], basis: &[f32], components: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
        let k = check_one(mean, basis, components.len(), out.len())?;
        self.run_lift(Lift { mean, basis, components, out, k, n: 1 });
        Ok(())
    }

    /// [`lift_batch`] by this path.
    ///
    /// # Errors
    /// [`ShapeError`] if the lengths do not fit together.
    pub fn lift_batch(
        self,
        mean: &[f32],
        basis: &[f32],
        components: &[f32],
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        let (k, n) = check(mean, basis, components.len(), out.len())?;
        self.run_lift(Lift { mean, basis, components, out, k, n });
        Ok(())
    }

    fn run_lift(self, job: Lift<'_>) {
        if job.k == 0 {
            for out in job.out.chunks_exact_mut(job.mean.len()) {
                out.copy_from_slice(job.mean);
            }
            return;
        }
        match self.0 {
            Path::Reference => reference::lift(job),
            Path::Portable => tile::lift::<_, 2, 2, 1>(tile::Portable, job),
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx2(path) => path.lift(job),
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx512(path) => path.lift(job),
        }
    }

    /// [`project`] by this path.
    ///
    /// # Errors
    /// [`ShapeError`] if the lengths do not fit together.
    pub fn project(self, mean: &[f32], basis: &[f32], residual: &[f32], out: &mut [f32]) -> Result<(), ShapeError> {
        let k = check_one(mean, basis, out.len(), residual.len())?;
        self.run_project(Project { mean, basis, residuals: residual, out, k, n: 1 });
        Ok(())
    }

    /// [`project_batch`] by this path.
    ///
    /// # Errors
    /// [`ShapeError`] if the lengths do not fit together.
    pub fn project_batch(
        self,
        mean: &[f32],
        basis: &[f32],
        residuals: &[f32],
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        let (k, n) = check(mean, basis, out.len(), residuals.len())?;
        self.run_project(Project { mean, basis, residuals, out, k, n });
        Ok(())
    }

    fn run_project(self, job: Project<'_>) {
        match self.0 {
            Path::Reference => reference::project(job),
            Path::Portable => tile::project::<_, 2, 2, 1>(tile::Portable, job),
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx2(path) => path.project(job),
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx512(path) => path.project(job),
        }
    }

    /// Reads all values once, as fast as this path can: the yardstick of `benches/kernel.rs`, and of no other use.
    #[doc(hidden)]
    #[must_use]
    pub fn read(self, values: &[f32]) -> f32 {
        match self.0 {
            Path::Reference => values.iter().sum(),
            Path::Portable => tile::read::<_, 2>(tile::Portable, values),
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx2(path) => path.read(values),
            #[cfg(all(feature = "std", target_arch = "x86_64"))]
            Path::Avx512(path) => path.read(values),
        }
    }
}

/// Checks the lengths and returns `k` and `n`.
fn check(mean: &[f32], basis: &[f32], components: usize, residuals: usize) -> Result<(usize, usize), ShapeError> {
    let d = mean.len();
    let (Some(k), Some(n)) = (basis.len().checked_div(d), residuals.checked_div(d)) else {
        return Err(ShapeError::NoWidth);
    };
    if !basis.len().is_multiple_of(d) {
        return Err(ShapeError::Basis { got: basis.len(), d });
    }
    if !residuals.is_multiple_of(d) {
        return Err(ShapeError::Residuals { got: residuals, d });
    }
    if n.checked_mul(k) != Some(components) {
        return Err(ShapeError::Components { got: components, positions: n, k });
    }
    Ok((k, n))
}

/// Checks the lengths for one position and returns `k`; divides only to say what is wrong.
fn check_one(mean: &[f32], basis: &[f32], components: usize, residual: usize) -> Result<usize, ShapeError> {
    let d = mean.len();
    if residual == d && d != 0 && components.checked_mul(d) == Some(basis.len()) {
        return Ok(components);
    }
    match check(mean, basis, components, residual) {
        Ok((k, 1)) => Ok(k),
        Ok((_, got)) => Err(ShapeError::Positions { got }),
        Err(error) => match residual.checked_div(d) {
            Some(got) if got != 1 => Err(ShapeError::Positions { got }),
            _ => Err(error),
        },
    }
}

#[cfg(test)]
mod tests;
