//! Unquantized types.

pub(super) fn f32_block(block: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*block);
}

pub(super) fn f16_block(block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16_to_f32(u16::from_le_bytes(*block));
}

pub(super) fn bf16_block(block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
}

/// Exact for every half, subnormals included.
///
/// A normal half only changes the bias of its exponent, from 15 to 127. A subnormal one, `f *
/// 2^-24`, is what is left of `2^-14 + f * 2^-24` without the `2^-14`: both are normal f32s. So it
/// needs no arithmetic on f32 subnormals, which is slow. A NaN keeps its payload. All three are
/// computed and one is chosen, without a branch, so that it vectorizes.
pub(super) fn f16_to_f32(half: u16) -> f32 {
    const BIAS_CHANGE: u32 = (127 - 15) << 23;
    const TWO_POW_MINUS_14: u32 = (127 - 14) << 23;
    const INFINITY: u32 = 0xff << 23;
    let half = u32::from(half);
    let sign = (half & 0x8000) << 16;
    let magnitude = (half & 0x7fff) << 13;
    let subnormal = f32::from_bits(magnitude | TWO_POW_MINUS_14) - f32::from_bits(TWO_POW_MINUS_14);
    let bits = match half & 0x7c00 {
        0 => subnormal.to_bits(),
        0x7c00 => magnitude | INFINITY,
        _ => magnitude + BIAS_CHANGE,
    };
    f32::from_bits(sign | bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_converts_to_f32_exactly() {
        for bits in 0..=u16::MAX {
            let expected = half::f16::from_bits(bits);
            let found = f16_to_f32(bits);
            if expected.is_nan() {
                assert!(found.is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(found.to_bits(), expected.to_f32_const().to_bits(), "{bits:#06x}");
            }
        }
    }
}
