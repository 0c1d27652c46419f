//! Lift and projection beside a plain read of the same basis and beside the products of ndarray and OpenBLAS.
//!
//! `cargo bench -p aeon-proto --bench kernel`. Criterion measures each variant for itself; the table at the end is the
//! claim. There all variants of a shape take turns within a round, so that a noisy neighbour hits them alike, and each
//! row is the median over the rounds of "this variant / the plain read of that round", with quartiles.
//!
//! OpenBLAS is loaded at run time (Debian: `apt install libopenblas0-pthread`), with one thread; without it its rows are
//! missing and a line says so.
#![expect(clippy::unwrap_used, reason = "a benchmark stops at its first mistake")]
#![expect(unsafe_code, reason = "calls into OpenBLAS")]

use std::{hint::black_box, sync::OnceLock, time::Instant};

use aeon_proto::kernel::Kernel;
use criterion::{BenchmarkId, Criterion, Throughput};
use ndarray::{ArrayView1, ArrayView2, ArrayViewMut1, ArrayViewMut2, Axis, linalg};

/// Width and components: Qwen 0.5B, Qwen Coder 7B and a 70B-class model at 8 per thousand.
const SHAPES: [(usize, usize); 3] = [(896, 8), (3584, 29), (8192, 66)];
const BATCHES: [usize; 2] = [1, 32];
const ROUNDS: usize = 41;
/// Time of one variant in one round.
const SLICE_NS: f64 = 300_000.0;

struct Case {
    d: usize,
    k: usize,
    n: usize,
    buffer: Vec<f32>,
    mean: Vec<f32>,
    components: Vec<f32>,
    residuals: Vec<f32>,
}

/// `cblas_sgemm` with 32-bit integers, as Debian builds it.
type Sgemm =
    unsafe extern "C" fn(i32, i32, i32, i32, i32, i32, f32, *const f32, i32, *const f32, i32, f32, *mut f32, i32);

const ROW_MAJOR: i32 = 101;
const PLAIN: i32 = 111;
const TRANSPOSED: i32 = 112;

/// The product of OpenBLAS with one thread, if the library is there.
fn openblas() -> Option<Sgemm> {
    static SGEMM: OnceLock<Option<Sgemm>> = OnceLock::new();
    *SGEMM.get_or_init(|| {
        // SAFETY: the library's initialisation has no conditions; both functions have these signatures since 0.2.
        unsafe {
            let library = libloading::Library::new("libopenblas.so.0")
                .inspect_err(|error| println!("no rows for OpenBLAS: {error}"))
                .ok()?;
            let threads: libloading::Symbol<'_, unsafe extern "C" fn(i32)> =
                library.get(b"openblas_set_num_threads").ok()?;
            threads(1);
            let sgemm = *library.get::<Sgemm>(b"cblas_sgemm").ok()?;
            // It stays loaded: the benchmark calls into it until its end.
            std::mem::forget(library);
            Some(sgemm)
        }
    })
}

type Variant<'a> = (String, Box<dyn FnMut() + 'a>);

impl Case {
    fn new(d: usize, k: usize, n: usize) -> Self {
        let mut state = 0x2545_f491_u32;
        let mut values = |len: usize| -> Vec<f32> {
            let mut next = || {
                state ^= state << 13;
                state ^= state >> 17;
                state ^= state << 5;
                (state >> 8) as f32 / 8_388_608.0 - 1.0
            };
            (0..len).map(|_| next()).collect()
        };
        // Room to start the basis at a multiple of 64 bytes, as in a basis file.
        let buffer = values(k * d + 16);
        Self { d, k, n, buffer, mean: values(d), components: values(n * k), residuals: values(n * d) }
    }

    fn basis(&self) -> &[f32] {
        let aligned = (0..16).find(|at| self.buffer[*at..].as_ptr().addr().is_multiple_of(64)).unwrap_or(0);
        &self.buffer[aligned..aligned + self.k * self.d]
    }

    /// The first variant is the yardstick.
    fn reads(&self) -> Variant<'_> {
        let (kernel, basis) = (Kernel::detect(), self.basis());
        (
            format!("read the basis once ({})", kernel.name()),
            Box::new(move || {
                black_box(kernel.read(black_box(basis)));
            }),
        )
    }

    fn lifts(&self) -> Vec<Variant<'_>> {
        let (mean, basis, components) = (&self.mean[..], self.basis(), &self.components[..]);
        let (d, k, n) = (self.d, self.k, self.n);
        let mut variants = vec![self.reads()];
        for kernel in Kernel::available() {
            let mut out = vec![0.0; n * d];
            variants.push((
                kernel.name().into(),
                Box::new(move || {
                    let basis = black_box(basis);
                    if n == 1 {
                        kernel.lift(mean, basis, components, &mut out).unwrap();
                    } else {
                        kernel.lift_batch(mean, basis, components, &mut out).unwrap();
                    }
                    black_box(&out);
                }),
            ));
        }
        let b = ArrayView2::from_shape((k, d), basis).unwrap();
        let m = ArrayView1::from(mean);
        if n == 1 {
            let c = ArrayView1::from(components);
            variants.push((
                "ndarray dot".into(),
                Box::new(move || {
                    black_box(black_box(c).dot(&b) + m);
                }),
            ));
            let mut out = vec![0.0; d];
            variants.push((
                "ndarray general_mat_vec_mul".into(),
                Box::new(move || {
                    out.copy_from_slice(mean);
                    linalg::general_mat_vec_mul(1.0, &black_box(b).t(), &c, 1.0, &mut ArrayViewMut1::from(&mut out));
                    black_box(&out);
                }),
            ));
            let mut out = vec![0.0; d];
            variants.push((
                "ndarray scaled_add by rows".into(),
                Box::new(move || {
                    out.copy_from_slice(mean);
                    let mut y = ArrayViewMut1::from(&mut out);
                    for (row, c) in black_box(b).axis_iter(Axis(0)).zip(components) {
                        y.scaled_add(*c, &row);
                    }
                    black_box(&out);
                }),
            ));
        } else {
            let c = ArrayView2::from_shape((n, k), components).unwrap();
            let mut out = vec![0.0; n * d];
            variants.push((
                "ndarray general_mat_mul".into(),
                Box::new(move || {
                    for out in out.chunks_exact_mut(d) {
                        out.copy_from_slice(mean);
                    }
                    let mut y = ArrayViewMut2::from_shape((n, d), &mut out).unwrap();
                    linalg::general_mat_mul(1.0, &black_box(c), &b, 1.0, &mut y);
                    black_box(&out);
                }),
            ));
        }
        if let Some(sgemm) = openblas() {
            let mut out = vec![0.0; n * d];
            let (rows, width, inner) = (n as i32, d as i32, k as i32);
            variants.push((
                "OpenBLAS sgemm".into(),
                Box::new(move || {
                    for out in out.chunks_exact_mut(d) {
                        out.copy_from_slice(mean);
                    }
                    let (c, b, y) = (black_box(components).as_ptr(), basis.as_ptr(), out.as_mut_ptr());
                    // SAFETY: n x k, k x d and n x d values without gaps, as the lengths and leading dimensions say.
                    unsafe {
                        sgemm(ROW_MAJOR, PLAIN, PLAIN, rows, width, inner, 1.0, c, inner, b, width, 1.0, y, width);
                    }
                    black_box(&out);
                }),
            ));
        }
        variants
    }

    fn projections(&self) -> Vec<Variant<'_>> {
        let (mean, basis, residuals) = (&self.mean[..], self.basis(), &self.residuals[..]);
        let (d, k, n) = (self.d, self.k, self.n);
        let mut variants = vec![self.reads()];
        for kernel in Kernel::available() {
            let mut out = vec![0.0; n * k];
            variants.push((
                kernel.name().into(),
                Box::new(move || {
                    let basis = black_box(basis);
                    if n == 1 {
                        kernel.project(mean, basis, residuals, &mut out).unwrap();
                    } else {
                        kernel.project_batch(mean, basis, residuals, &mut out).unwrap();
                    }
                    black_box(&out);
                }),
            ));
        }
        let b = ArrayView2::from_shape((k, d), basis).unwrap();
        let m = ArrayView1::from(mean);
        if n == 1 {
            let r = ArrayView1::from(residuals);
            variants.push((
                "ndarray dot".into(),
                Box::new(move || {
                    black_box(black_box(b).dot(&(&r - &m)));
                }),
            ));
        } else {
            let r = ArrayView2::from_shape((n, d), residuals).unwrap();
            variants.push((
                "ndarray dot".into(),
                Box::new(move || {
                    black_box((&black_box(r) - &m).dot(&b.t()));
                }),
            ));
        }
        if let Some(sgemm) = openblas() {
            let (mut centred, mut out) = (vec![0.0; n * d], vec![0.0; n * k]);
            let (rows, width, inner) = (n as i32, d as i32, k as i32);
            variants.push((
                "OpenBLAS sgemm".into(),
                Box::new(move || {
                    for (to, from) in centred.chunks_exact_mut(d).zip(black_box(residuals).chunks_exact(d)) {
                        for ((to, from), mean) in to.iter_mut().zip(from).zip(mean) {
                            *to = from - mean;
                        }
                    }
                    let (r, b, c) = (centred.as_ptr(), basis.as_ptr(), out.as_mut_ptr());
                    // SAFETY: n x d, k x d and n x k values without gaps, as the lengths and leading dimensions say.
                    unsafe {
                        sgemm(ROW_MAJOR, PLAIN, TRANSPOSED, rows, inner, width, 1.0, r, width, b, width, 0.0, c, inner);
                    }
                    black_box(&out);
                }),
            ));
        }
        variants
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let cases: Vec<Case> = SHAPES.iter().flat_map(|(d, k)| BATCHES.map(|n| Case::new(*d, *k, n))).collect();
    for case in &cases {
        measure(&mut criterion, "lift", case, case.lifts());
        measure(&mut criterion, "project", case, case.projections());
    }
    criterion.final_summary();
    // `cargo test --benches` only wants to know that it runs.
    let rounds = if std::env::args().any(|arg| arg == "--test") { 1 } else { ROUNDS };
    println!("\nratio to reading the basis once: median (quartiles) of {rounds} interleaved rounds");
    for case in &cases {
        table("lift", case, case.lifts(), rounds);
        table("project", case, case.projections(), rounds);
    }
}

fn measure(criterion: &mut Criterion, operation: &str, case: &Case, variants: Vec<Variant<'_>>) {
    let mut group = criterion.benchmark_group(format!("{operation} {}x{} batch {}", case.d, case.k, case.n));
    group.sample_size(20).warm_up_time(std::time::Duration::from_millis(200));
    group.measurement_time(std::time::Duration::from_millis(600));
    group.throughput(Throughput::Bytes(4 * (case.d * case.k) as u64));
    for (name, mut run) in variants {
        group.bench_function(BenchmarkId::from_parameter(name), |bencher| bencher.iter(&mut run));
    }
    group.finish();
}

fn table(operation: &str, case: &Case, mut variants: Vec<Variant<'_>>, rounds: usize) {
    let repeats: Vec<usize> = variants
        .iter_mut()
        .map(|(_, run)| {
            time(run, 3);
            (SLICE_NS / time(run, 5).max(1.0)).clamp(1.0, 1e6) as usize
        })
        .collect();
    let mut times = vec![Vec::new(); variants.len()];
    for _ in 0..rounds {
        for (((_, run), repeats), times) in variants.iter_mut().zip(&repeats).zip(&mut times) {
            // Once unmeasured: the variant before it left its own lines in the cache.
            time(run, 1);
            times.push(time(run, *repeats));
        }
    }
    println!("\n{operation} {}x{}, batch {}", case.d, case.k, case.n);
    for ((name, _), own) in variants.iter().zip(&times) {
        let mut ratios: Vec<f64> = own.iter().zip(&times[0]).map(|(own, read)| own / read).collect();
        let mut own = own.clone();
        for list in [&mut ratios, &mut own] {
            list.sort_by(f64::total_cmp);
        }
        let at = |list: &[f64], quarter: usize| list[(list.len() - 1) * quarter / 4];
        println!(
            "  {name:<32} {:8.2} ({:.2}-{:.2})   {:10.0} ns",
            at(&ratios, 2),
            at(&ratios, 1),
            at(&ratios, 3),
            at(&own, 2)
        );
    }
}

/// Nanoseconds of one call.
fn time(run: &mut dyn FnMut(), repeats: usize) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        run();
    }
    start.elapsed().as_nanos() as f64 / repeats as f64
}
