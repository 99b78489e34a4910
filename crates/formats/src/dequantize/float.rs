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
/// The half's exponent and fraction, moved to an f32's place, read as the value times 2^-112 (the difference of the biases, 127 - 15); the product with 2^112 is
/// exact. Infinities and NaNs get the f32's exponent; a NaN keeps its payload. Branch-free, so that it vectorizes.
pub(super) fn f16_to_f32(half: u16) -> f32 {
    const TWO_POW_112: f32 = f32::from_bits((127 + 112) << 23);
    let half = u32::from(half);
    let sign = (half & 0x8000) << 16;
    let scaled = f32::from_bits((half & 0x7fff) << 13) * TWO_POW_112;
    let special = if half & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(sign | scaled.to_bits() | special)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_is_exact() {
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
