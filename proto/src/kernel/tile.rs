//! The kernels over sixteen lanes at a time, written once for every instruction set.
//!
//! A [`Lanes`] value is the proof that its instructions exist; AVX-512 and AVX2 implement it in `x86`, plain arrays here.
//! The code is all `inline(always)`, so that it takes on the target features of the function that calls it.
//!
//! Lift holds a tile of outputs in registers over all rows of the basis: the basis is read once and each output written
//! once. For several positions a tile of the basis is first packed into a small buffer on the stack: rows of a wide
//! basis lie a multiple of 4 KiB apart, would share the same few lines of the first-level cache and push each other out.
//! Projection takes several rows side by side, since the order of the additions leaves one chain of them a row.

use super::{Lift, Project, reference};

/// Lanes of one vector: the number of partial sums in the definition of the projection.
pub(super) const LANES: usize = 16;

/// Rows of the basis packed at a time: 8 KiB for tiles of four vectors.
const PACKED_ROWS: usize = 32;

/// Vectors of `r - mean` that a projection prepares at a time: one page of each row.
const CHUNK: usize = 64;

/// Rows of the basis that share a prepared chunk.
const PANEL_ROWS: usize = 32;

/// Sixteen f32 lanes, and the operations on them that round like the scalar ones.
pub(super) trait Lanes: Copy {
    /// Sixteen values, in one register or several.
    type Vector: Copy;
    /// All lanes the same.
    fn splat(self, value: f32) -> Self::Vector;
    /// Reads sixteen values, at any alignment.
    fn load(self, values: &[f32; LANES]) -> Self::Vector;
    /// Writes sixteen values.
    fn store(self, vector: Self::Vector, out: &mut [f32; LANES]);
    /// Lane by lane, each rounded.
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Lane by lane, each rounded.
    fn sub(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// Lane by lane, each rounded.
    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// [`reference::tree`].
    fn tree(self, vector: Self::Vector) -> f32;

    /// Runs `work` in a function of its own, compiled for these instructions. An inner loop that is inlined many times
    /// over into one function gets too few registers.
    fn outline<W: Work<Self>>(self, work: W);

    /// Reads up to fifteen values; the other lanes are zero.
    #[inline(always)]
    fn load_head(self, values: &[f32]) -> Self::Vector {
        let mut padded = [0.0; LANES];
        for (lane, value) in padded.iter_mut().zip(values) {
            *lane = *value;
        }
        self.load(&padded)
    }

    /// Writes as many lanes as `out` has places.
    #[inline(always)]
    fn store_head(self, vector: Self::Vector, out: &mut [f32]) {
        let mut padded = [0.0; LANES];
        self.store(vector, &mut padded);
        for (value, lane) in out.iter_mut().zip(padded) {
            *value = lane;
        }
    }
}

/// Something to do with lanes of some kind.
pub(super) trait Work<L> {
    /// Does it.
    fn run(self, lanes: L);
}

/// Lanes of plain arrays, for the compiler to vectorise.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

#[rustfmt::skip]
impl Lanes for Portable {
    type Vector = [f32; LANES];
    #[inline(always)]
    fn splat(self, value: f32) -> Self::Vector { [value; LANES] }
    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::Vector { *values }
    #[inline(always)]
    fn store(self, vector: Self::Vector, out: &mut [f32; LANES]) { *out = vector; }
    #[inline(always)]
    fn add(self, mut a: Self::Vector, b: Self::Vector) -> Self::Vector { for (a, b) in a.iter_mut().zip(b) { *a += b; } a }
    #[inline(always)]
    fn sub(self, mut a: Self::Vector, b: Self::Vector) -> Self::Vector { for (a, b) in a.iter_mut().zip(b) { *a -= b; } a }
    #[inline(always)]
    fn mul(self, mut a: Self::Vector, b: Self::Vector) -> Self::Vector { for (a, b) in a.iter_mut().zip(b) { *a *= b; } a }
    #[inline(always)]
    fn tree(self, vector: Self::Vector) -> f32 { reference::tree(vector) }
    #[inline(never)]
    fn outline<W: Work<Self>>(self, work: W) { work.run(self); }
}

/// Lift: `ONE` vectors a tile for one position, `ROWS` positions by `WIDE` vectors for several.
#[inline(always)]
pub(super) fn lift<L: Lanes, const ONE: usize, const ROWS: usize, const WIDE: usize>(lanes: L, job: Lift<'_>) {
    let Lift { mean, basis, components, out, k, n } = job;
    let d = mean.len();
    if n == 1 {
        let start = lift_one::<L, ONE>(lanes, mean, basis, components, out, 0);
        let start = lift_one::<L, 8>(lanes, mean, basis, components, out, start);
        let start = lift_one::<L, 1>(lanes, mean, basis, components, out, start);
        lift_rest(lanes, mean, basis, components, out, start);
        return;
    }
    let mut columns = Columns { mean, basis, components, out, k, n, start: 0 };
    lift_many::<L, ROWS, WIDE>(lanes, &mut columns);
    lift_many::<L, ROWS, 1>(lanes, &mut columns);
    let start = columns.start;
    for (out, components) in columns.out.chunks_exact_mut(d).zip(components.chunks_exact(k.max(1))) {
        lift_rest(lanes, mean, basis, components, out, start);
    }
}

/// `N` vectors at `start`, if they are all there.
#[inline(always)]
fn block<const N: usize>(values: &[f32], start: usize) -> Option<&[[f32; LANES]; N]> {
    values.get(start..)?.as_chunks().0.first_chunk()
}

/// `N` vectors at `start` to write to, if they are all there.
#[inline(always)]
fn block_mut<const N: usize>(values: &mut [f32], start: usize) -> Option<&mut [[f32; LANES]; N]> {
    values.get_mut(start..)?.as_chunks_mut().0.first_chunk_mut()
}

/// Lifts one position from column `start` on in tiles of `N` vectors, and says where it stopped.
#[inline(always)]
fn lift_one<L: Lanes, const N: usize>(
    lanes: L,
    mean: &[f32],
    basis: &[f32],
    components: &[f32],
    out: &mut [f32],
    mut start: usize,
) -> usize {
    let d = mean.len();
    while let (Some(mean), Some(out)) = (block::<N>(mean, start), block_mut::<N>(out, start)) {
        let mut sums = [lanes.splat(0.0); N];
        for (sum, mean) in sums.iter_mut().zip(mean) {
            *sum = lanes.load(mean);
        }
        let mut rows = basis.get(start..).unwrap_or_default();
        for c in components {
            let Some(row) = block::<N>(rows, 0) else { break };
            let c = lanes.splat(*c);
            for (sum, b) in sums.iter_mut().zip(row) {
                *sum = lanes.add(*sum, lanes.mul(c, lanes.load(b)));
            }
            rows = rows.get(d..).unwrap_or_default();
        }
        for (sum, out) in sums.iter().zip(out) {
            lanes.store(*sum, out);
        }
        start = start.saturating_add(N.saturating_mul(LANES));
    }
    start
}

/// Lifts the last columns of one position, fewer than sixteen.
#[inline(always)]
fn lift_rest<L: Lanes>(lanes: L, mean: &[f32], basis: &[f32], components: &[f32], out: &mut [f32], start: usize) {
    let d = mean.len();
    let (Some(tail), Some(out)) = (mean.get(start..), out.get_mut(start..)) else { return };
    if tail.is_empty() {
        return;
    }
    let mut sum = lanes.load_head(tail);
    for (row, c) in basis.chunks_exact(d).zip(components) {
        let b = lanes.load_head(row.get(start..).unwrap_or_default());
        sum = lanes.add(sum, lanes.mul(lanes.splat(*c), b));
    }
    lanes.store_head(sum, out);
}

/// A lift of several positions, done up to column `start`.
struct Columns<'a> {
    mean: &'a [f32],
    basis: &'a [f32],
    components: &'a [f32],
    out: &'a mut [f32],
    k: usize,
    n: usize,
    start: usize,
}

/// Lifts all positions in tiles of `N` vectors, `M` positions side by side.
#[inline(always)]
fn lift_many<L: Lanes, const M: usize, const N: usize>(lanes: L, columns: &mut Columns<'_>) {
    let (d, n) = (columns.mean.len(), columns.n);
    let mut packed = [[[0.0_f32; LANES]; N]; PACKED_ROWS];
    while block::<N>(columns.mean, columns.start).is_some() {
        let mut done = 0_usize;
        let mut rows = columns.basis.get(columns.start..).unwrap_or_default();
        while done < columns.k {
            let count = share(columns.k.saturating_sub(done), PACKED_ROWS);
            for slot in packed.iter_mut().take(count) {
                let Some(row) = block::<N>(rows, 0) else { break };
                *slot = *row;
                rows = rows.get(d..).unwrap_or_default();
            }
            let packed = packed.get(..count).unwrap_or_default();
            let mut position = 0_usize;
            while n.saturating_sub(position) >= M {
                lift_group::<L, M, N>(lanes, columns, packed, done, position);
                position = position.saturating_add(M);
            }
            while position < n {
                lift_group::<L, 1, N>(lanes, columns, packed, done, position);
                position = position.saturating_add(1);
            }
            done = done.saturating_add(count);
        }
        columns.start = columns.start.saturating_add(N.saturating_mul(LANES));
    }
}

/// Adds the packed rows, the first of which is row `done` of the basis, to `M` positions from `position` on.
///
/// Between two packs the sums rest in `out`: f32 to f32, so nothing is rounded on the way.
#[inline(always)]
fn lift_group<L: Lanes, const M: usize, const N: usize>(
    lanes: L,
    columns: &mut Columns<'_>,
    packed: &[[[f32; LANES]; N]],
    done: usize,
    position: usize,
) {
    let (d, k, start) = (columns.mean.len(), columns.k, columns.start);
    let mut sums = [[lanes.splat(0.0); N]; M];
    let mut components = [&[][..]; M];
    let mut row = position;
    for (sums, components) in sums.iter_mut().zip(&mut components) {
        let from = row.saturating_mul(k).saturating_add(done);
        *components = columns.components.get(from..).and_then(|c| c.get(..packed.len())).unwrap_or_default();
        let at = row.saturating_mul(d).saturating_add(start);
        let source = if done == 0 { block::<N>(columns.mean, start) } else { block::<N>(columns.out, at) };
        for (sum, value) in sums.iter_mut().zip(source.into_iter().flatten()) {
            *sum = lanes.load(value);
        }
        row = row.saturating_add(1);
    }
    for (i, row) in packed.iter().enumerate() {
        let mut b = [lanes.splat(0.0); N];
        for (b, value) in b.iter_mut().zip(row) {
            *b = lanes.load(value);
        }
        for (sums, components) in sums.iter_mut().zip(&components) {
            let Some(c) = components.get(i) else { return };
            let c = lanes.splat(*c);
            for (sum, b) in sums.iter_mut().zip(&b) {
                *sum = lanes.add(*sum, lanes.mul(c, *b));
            }
        }
    }
    let mut row = position;
    for sums in &sums {
        let at = row.saturating_mul(d).saturating_add(start);
        for (sum, out) in sums.iter().zip(block_mut::<N>(columns.out, at).into_iter().flatten()) {
            lanes.store(*sum, out);
        }
        row = row.saturating_add(1);
    }
}

/// Projection: at most `ONE` rows of the basis (up to 8) side by side for one position, `ROWS` rows by `WIDE` positions
/// for several.
///
/// Panels of rows, in them groups of positions, chunks of columns, groups of rows: a panel stays in the second-level
/// cache while all positions pass by, a chunk of `r - mean` in the first while the rows of the panel do.
#[inline(always)]
pub(super) fn project<L: Lanes, const ONE: usize, const ROWS: usize, const WIDE: usize>(lanes: L, job: Project<'_>) {
    let Project { mean, basis, residuals, out, k, n } = job;
    let d = mean.len();
    let mut panel = Panel { mean, basis, residuals: &[], out, k, first: 0, rows: 0 };
    while panel.first < k {
        panel.rows = share(k.saturating_sub(panel.first), PANEL_ROWS);
        let mut position = 0_usize;
        while position < n {
            panel.residuals = residuals.get(position.saturating_mul(d)..).unwrap_or_default();
            position = position.saturating_add(if n.saturating_sub(position) >= WIDE {
                project_panel::<L, ROWS, WIDE>(lanes, &mut panel, position);
                WIDE
            } else {
                project_panel::<L, ONE, 1>(lanes, &mut panel, position);
                1
            });
        }
        panel.first = panel.first.saturating_add(panel.rows);
        panel.basis = panel.basis.get(panel.rows.saturating_mul(d)..).unwrap_or_default();
    }
}

/// How many of `left` to take so that parts of at most `most` come out nearly equal: what is left over alone would take
/// as long as a full part.
#[inline(always)]
fn share(left: usize, most: usize) -> usize {
    if left <= most { left } else { left.div_ceil(left.div_ceil(most).max(1)) }
}

/// Rows `first` to `first + rows` of the basis, which starts at the first of them, and residuals from one position on.
struct Panel<'a> {
    mean: &'a [f32],
    basis: &'a [f32],
    residuals: &'a [f32],
    out: &'a mut [f32],
    k: usize,
    first: usize,
    rows: usize,
}

/// Projects `M` positions, the first of which is number `position`, onto the rows of the panel.
#[inline(always)]
fn project_panel<L: Lanes, const R: usize, const M: usize>(lanes: L, panel: &mut Panel<'_>, position: usize) {
    let d = panel.mean.len();
    let zero = lanes.splat(0.0);
    let mut x = [[zero; M]; CHUNK];
    let mut sums = [[zero; M]; PANEL_ROWS];
    let mut start = 0_usize;
    while start < d {
        let columns = d.saturating_sub(start).min(CHUNK.saturating_mul(LANES));
        let vectors = center::<L, M>(lanes, panel.mean, panel.residuals, start, columns, &mut x);
        let x = x.get(..vectors).unwrap_or_default();
        let mut row = 0_usize;
        while row < panel.rows {
            let take = share(panel.rows.saturating_sub(row), R);
            let basis = panel.basis.get(row.saturating_mul(d).saturating_add(start)..).unwrap_or_default();
            if let Some(sums) = sums.get_mut(row..) {
                accumulate_rows(lanes, take, Accumulate { basis, d, columns, x, sums });
            }
            row = row.saturating_add(take);
        }
        start = start.saturating_add(columns);
    }
    for (row, sums) in sums.iter().take(panel.rows).enumerate() {
        let mut at = position.saturating_mul(panel.k).saturating_add(panel.first).saturating_add(row);
        for sum in sums {
            if let Some(out) = panel.out.get_mut(at) {
                *out = lanes.tree(*sum);
            }
            at = at.saturating_add(panel.k);
        }
    }
}

/// Writes `r - mean` of `columns` columns from `start` on to `x` and returns the vectors written. Lanes past the last
/// column are zero.
#[inline(always)]
fn center<L: Lanes, const M: usize>(
    lanes: L,
    mean: &[f32],
    residuals: &[f32],
    start: usize,
    columns: usize,
    x: &mut [[L::Vector; M]; CHUNK],
) -> usize {
    let d = mean.len();
    let mut vectors = 0_usize;
    for m in 0..M {
        let at = m.saturating_mul(d).saturating_add(start);
        let (Some(mean), Some(r)) = (mean.get(start..), residuals.get(at..)) else { return 0 };
        let (Some(mean), Some(r)) = (mean.get(..columns), r.get(..columns)) else { return 0 };
        let ((mean, mean_rest), (r, r_rest)) = (mean.as_chunks::<LANES>(), r.as_chunks::<LANES>());
        for ((x, mean), r) in x.iter_mut().zip(mean).zip(r) {
            if let Some(x) = x.get_mut(m) {
                *x = lanes.sub(lanes.load(r), lanes.load(mean));
            }
        }
        vectors = mean.len();
        if !mean_rest.is_empty()
            && let Some(x) = x.get_mut(vectors).and_then(|x| x.get_mut(m))
        {
            *x = lanes.sub(lanes.load_head(r_rest), lanes.load_head(mean_rest));
            vectors = vectors.saturating_add(1);
        }
    }
    vectors
}

#[inline(always)]
fn accumulate_rows<L: Lanes, const M: usize>(lanes: L, rows: usize, job: Accumulate<'_, L, M>) {
    match rows {
        1 => lanes.outline(Rows::<_, 1, M>(job)),
        2 => lanes.outline(Rows::<_, 2, M>(job)),
        3 => lanes.outline(Rows::<_, 3, M>(job)),
        4 => lanes.outline(Rows::<_, 4, M>(job)),
        5 => lanes.outline(Rows::<_, 5, M>(job)),
        6 => lanes.outline(Rows::<_, 6, M>(job)),
        7 => lanes.outline(Rows::<_, 7, M>(job)),
        _ => lanes.outline(Rows::<_, 8, M>(job)),
    }
}

/// The products of one chunk of some rows, to be added to the sums of these rows.
struct Accumulate<'a, L: Lanes, const M: usize> {
    /// Starts with the chunk of the first row.
    basis: &'a [f32],
    d: usize,
    columns: usize,
    x: &'a [[L::Vector; M]],
    sums: &'a mut [[L::Vector; M]],
}

/// [`Accumulate`] for `R` rows.
struct Rows<'a, L: Lanes, const R: usize, const M: usize>(Accumulate<'a, L, M>);

impl<L: Lanes, const R: usize, const M: usize> Work<L> for Rows<'_, L, R, M> {
    #[inline(always)]
    fn run(self, lanes: L) {
        let Accumulate { basis, d, columns, x, sums } = self.0;
        let Some(sums) = sums.first_chunk_mut::<R>() else { return };
        let whole = columns / LANES;
        let Some((x, x_rest)) = x.split_at_checked(whole) else { return };
        let (mut rows, mut rests) = ([&[][..]; R], [&[][..]; R]);
        let mut at = 0_usize;
        for (row, rest) in rows.iter_mut().zip(&mut rests) {
            let values = basis.get(at..).and_then(|row| row.get(..columns)).unwrap_or_default();
            let (vectors, values) = values.as_chunks::<LANES>();
            let Some(vectors) = vectors.get(..whole) else { return };
            (*row, *rest) = (vectors, values);
            at = at.saturating_add(d);
        }
        let mut own = *sums;
        for (j, x) in x.iter().enumerate() {
            for (sums, row) in own.iter_mut().zip(&rows) {
                let Some(b) = row.get(j) else { return };
                let b = lanes.load(b);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = lanes.add(*sum, lanes.mul(b, *x));
                }
            }
        }
        // The empty lanes of the last vector add +0 to sums that are never -0, since they started at +0: their bits
        // stay.
        if let Some(x) = x_rest.first() {
            for (sums, row) in own.iter_mut().zip(&rests) {
                let b = lanes.load_head(row);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = lanes.add(*sum, lanes.mul(b, *x));
                }
            }
        }
        *sums = own;
    }
}

/// Adds up all values in an order of its own, as fast as they can be read: the yardstick of the benchmark.
#[inline(always)]
pub(super) fn read<L: Lanes, const N: usize>(lanes: L, values: &[f32]) -> f32 {
    let mut sums = [lanes.splat(0.0); N];
    for block in values.as_chunks::<LANES>().0.as_chunks::<N>().0 {
        for (sum, value) in sums.iter_mut().zip(block) {
            *sum = lanes.add(*sum, lanes.load(value));
        }
    }
    let mut total = lanes.splat(0.0);
    for sum in sums {
        total = lanes.add(total, sum);
    }
    lanes.tree(total)
}
