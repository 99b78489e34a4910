use super::super::linear::Target;
use super::super::quantized_matrix::tests::{packed, quantized, random_blocks};
use super::super::swiglu::swiglu;
use super::*;
use crate::kernels::guarded::on_both_sides;
use crate::kernels::{Isa, Rows, Threads, reference};

#[test]
fn quantized_matmul_equals_the_reference_over_odd_shapes() {
    on_both_sides(compare_odd_shapes);
}

fn compare_odd_shapes() {
    let shapes = [
        (1, 1, 32),
        (1, 300, 608),
        (2, 47, 64),
        (15, 33, 96),
        (16, 16, 256),
        (16, 300, 96),
        (17, 100, 64),
        (150, 40, 32),
    ];
    for (rows, outputs, inputs) in shapes {
        let mut x = Rows::new(inputs);
        x.resize(rows);
        for row in 0..rows {
            x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
        }
        for dtype in quantized() {
            let blocks = random_blocks(dtype, outputs as u64, outputs * inputs / BLOCK);
            for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let compute = Compute { isa, threads: Threads::new(count).unwrap() };
                let w = packed(&compute.threads, dtype, &blocks, inputs);
                let mut a = QuantizedRows::new();
                a.fill_from(&compute, &x);
                let mut y = Rows::new(outputs + 16);
                y.resize(rows);
                for (times, target) in [(1.0, Target::Set), (2.0, Target::Add)] {
                    quantized_matmul(&compute, &a, &w, Destination { y: &y.share(), column: 16, target });
                    for row in 0..rows {
                        let expected = reference::quantized_matmul(x.row(row), dtype, &blocks);
                        let expected: Vec<_> = expected.into_iter().map(|y| times * y).collect();
                        assert_eq!(y.row(row)[16..], expected, "{isa} {dtype} {rows}x{outputs}x{inputs} row {row}");
                    }
                }
            }
        }
    }
}

#[test]
fn gated_quantized_matmul_equals_matmul_then_swiglu() {
    on_both_sides(compare_gated);
}

fn compare_gated() {
    for (rows, half, inputs) in [(1, 32, 32), (15, 64, 96), (17, 96, 64), (33, 32, 608), (150, 160, 32), (2, 256, 128)]
    {
        let mut x = Rows::new(inputs);
        x.resize(rows);
        for row in 0..rows {
            x.row_mut(row).copy_from_slice(&reference::random(900 + row as u64, inputs));
        }
        for dtype in quantized() {
            let blocks = random_blocks(dtype, 3, 2 * half * inputs / BLOCK);
            for (isa, count) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let compute = Compute { isa, threads: Threads::new(count).unwrap() };
                let w = packed(&compute.threads, dtype, &blocks, inputs);
                let mut a = QuantizedRows::new();
                let mut found = QuantizedRows::new();
                a.fill_from(&compute, &x);
                gated_quantized_matmul(&compute, &a, &w, &ProductBuffers::new(&compute.threads), &mut found);
                assert_eq!(found.rows(), rows);
                for row in 0..rows {
                    let both = reference::quantized_matmul(x.row(row), dtype, &blocks);
                    let mut expected = vec![0.0; half];
                    swiglu(Isa::SCALAR, &both[..half], &both[half..], &mut expected);
                    let found = found.group(row / GROUP);
                    assert_eq!(found.len(), half / BLOCK);
                    for (found, expected) in found.iter().zip(reference::quantize(&expected)) {
                        let found = (found.quants[row % GROUP], found.scales[row % GROUP]);
                        assert_eq!(
                            found,
                            (expected.quants, expected.scale),
                            "{isa} {dtype} {rows}x{half}x{inputs} row {row}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn quantized_matmul_reference_is_near_the_float_product() {
    for dtype in quantized() {
        let blocks = random_blocks(dtype, 5, 3 * 4);
        let x = reference::random(6, 128);
        let form = dtype.quant_format().unwrap();
        let mut w = vec![0.0; 3 * 128];
        blocks.iter().zip(w.as_chunks_mut().0).for_each(|(block, out)| block.elements(form, out));
        let found = reference::quantized_matmul(&x, dtype, &blocks);
        for (row, found) in w.chunks_exact(128).zip(found) {
            let expected: f32 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
            let size: f32 = row.iter().zip(&x).map(|(w, x)| (w * x).powi(2)).sum::<f32>().sqrt();
            assert!((found - expected).abs() < 0.03 * size, "{dtype}: {found}, {expected}, of {size}");
        }
    }
}
