use baton_formats::Dtype;

use super::super::linear::{Target, WeightShape};
use super::super::row_buffers::RowBuffers;
use super::super::swiglu::swiglu;
use super::*;
use crate::error::EngineError;
use crate::kernels::guarded::on_both_sides;
use crate::kernels::pairs::Number;
use crate::kernels::{Isa, WeightMemory, reference};

const ELEMENTS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Numbers in [-1, 1] of as few bits as every type has.
fn shortened(w: &[f32]) -> Vec<f32> {
    w.iter().map(|w| (w * 128.0).round() / 128.0).collect()
}

fn packed(threads: &Threads, element: Dtype, w: &[f32], inputs: usize) -> PackedMatrix {
    let read = |range: Range<usize>, to: &mut [f32]| {
        to.copy_from_slice(&w[range.start * inputs..range.end * inputs]);
        Ok(())
    };
    let shape = WeightShape { outputs: w.len() / inputs, inputs };
    PackedMatrix::pack(threads, &WeightMemory::guarded(), element, shape, read).unwrap()
}

#[test]
fn matmul_equals_the_reference_over_odd_shapes() {
    on_both_sides(compare_odd_shapes);
}

fn compare_odd_shapes() {
    let shapes = [
        (1, 1, 1),
        (1, 33, 5),
        (1, 300, 700),
        (2, 16, 17),
        (7, 47, 300),
        (12, 32, 64),
        (13, 100, 257),
        (15, 31, 33),
        (16, 48, 31),
        (17, 17, 15),
        (29, 65, 520),
        (33, 47, 96),
        (65, 33, 1100),
        (100, 40, 9),
    ];
    for (rows, outputs, inputs) in shapes {
        let w = reference::random(outputs as u64, outputs * inputs);
        let short = shortened(&w);
        let mut x = Rows::new(inputs);
        x.resize(rows);
        for row in 0..rows {
            x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
        }
        let cases = Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]);
        for (isa, count, element) in cases.flat_map(|(isa, n)| ELEMENTS.map(|element| (isa, n, element))) {
            let compute = Compute { isa, threads: Threads::new(count).unwrap() };
            let w = if element == Dtype::F32 { &w } else { &short };
            let mut rounded = RoundedRows::new();
            let buffers = RowBuffers::new(&compute.threads, inputs);
            let copy = |row: usize, to: &mut [f32]| to.copy_from_slice(x.row(row));
            match count {
                1 => rounded.fill_from(&compute, &x),
                _ => rounded.fill(&compute, x.shape(), &buffers, copy),
            }
            let w_packed = packed(&compute.threads, element, w, inputs);
            let mut y = Rows::new(outputs);
            y.resize(rows);
            for target in [Target::Set, Target::Add] {
                let before: Vec<_> = (0..rows).map(|row| y.row(row).to_vec()).collect();
                let to = Destination { y: &y.share(), column: 0, target };
                match element {
                    Dtype::BF16 => rounded_matmul(&compute, &rounded, &w_packed, to),
                    _ => single_matmul(&compute, &x, &w_packed, to),
                }
                for (row, before) in before.iter().enumerate() {
                    let x: Vec<_> = match element {
                        Dtype::BF16 => x.row(row).iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
                        _ => x.row(row).to_vec(),
                    };
                    let start = if target == Target::Set { vec![0.0; outputs] } else { before.clone() };
                    let in_tiles = isa.has_tiles() && element == Dtype::BF16;
                    let expected = if in_tiles {
                        reference::matmul_in_tiles(&start, &x, w)
                    } else {
                        reference::matmul_onto(&start, &x, w)
                    };
                    assert_eq!(y.row(row), expected, "{isa} {element} {rows}x{outputs}x{inputs} {target:?} row {row}");
                }
            }
        }
    }
}

/// Random rows, and the same rounded to bfloat16 in the form that products take.
fn rounded_rows(compute: &Compute, shape: RowShape) -> (Vec<Vec<f32>>, RoundedRows) {
    let RowShape { rows, columns: inputs } = shape;
    let x: Vec<_> = (0..rows).map(|row| shortened(&reference::random(900 + row as u64, inputs))).collect();
    let mut rounded = RoundedRows::new();
    let copy = |row: usize, to: &mut [f32]| to.copy_from_slice(&x[row]);
    rounded.fill(compute, shape, &RowBuffers::new(&compute.threads, inputs), copy);
    (x, rounded)
}

fn expected_product(isa: Isa, start: &[f32], x: &[f32], w: &[f32]) -> Vec<f32> {
    if isa.has_tiles() { reference::matmul_in_tiles(start, x, w) } else { reference::matmul_onto(start, x, w) }
}

#[test]
fn gated_matmul_equals_matmul_then_swiglu() {
    on_both_sides(compare_gated);
}

fn compare_gated() {
    for (rows, half, inputs) in [(1, 32, 32), (15, 64, 96), (17, 96, 64), (33, 32, 608), (100, 64, 32)] {
        let weights = shortened(&reference::random(3, 2 * half * inputs));
        for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
            let compute = Compute { isa, threads: Threads::new(count).unwrap() };
            let w = packed(&compute.threads, Dtype::BF16, &weights, inputs);
            let (x, rounded) = rounded_rows(&compute, RowShape { rows, columns: inputs });
            let mut found = RoundedRows::new();
            gated_matmul(&compute, &rounded, &w, &ProductBuffers::new(&compute.threads), &mut found);
            assert_eq!(found.rows(), rows);
            for (row, x) in x.iter().enumerate() {
                let both = expected_product(isa, &vec![0.0; 2 * half], x, &weights);
                let mut expected = vec![0.0; half];
                swiglu(Isa::SCALAR, &both[..half], &both[half..], &mut expected);
                let expected: Vec<_> = expected.into_iter().map(<bf16 as Number>::of).collect();
                // SAFETY: a row of so many columns.
                let found = unsafe { std::slice::from_raw_parts(found.as_ptr().add(row * found.stride()), half) };
                assert_eq!(found, expected, "{isa} {rows}x{half}x{inputs} row {row}");
            }
        }
    }
}

#[test]
fn row_of_packed_matrix_reads_back() {
    let w = shortened(&reference::random(1, 70 * 9));
    for element in ELEMENTS {
        let packed = packed(&Threads::new(1).unwrap(), element, &w, 9);
        let mut row = [0.0; 9];
        packed.copy_row(69, &mut row);
        assert_eq!(row, w[69 * 9..]);
    }
}

#[test]
fn failed_read_fails_packing_of_matrix() {
    let read = |range: Range<usize>, _: &mut [f32]| {
        if range.start == 32 { Err(EngineError::Model("row 32".to_owned())) } else { Ok(()) }
    };
    let threads = Threads::new(2).unwrap();
    let memory = WeightMemory::new();
    let shape = WeightShape { outputs: 64, inputs: 4 };
    let failed = PackedMatrix::pack(&threads, &memory, Dtype::F32, shape, read).err().unwrap();
    assert_eq!(failed.to_string(), "row 32");
}
