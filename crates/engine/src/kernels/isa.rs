//! Which instruction set the kernels run with.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Set {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// An instruction set that this CPU has: a value of this type is the proof. All sets give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Isa(pub(super) Set);

impl Isa {
    /// No vector instructions beyond what the compiler assumes.
    pub const SCALAR: Self = Self(Set::Scalar);

    /// The fastest one.
    pub fn detect() -> Self {
        let all = Self::available();
        all[all.len() - 1]
    }

    /// All of them, slowest first.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)] // other architectures have one
        let mut all = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            all.push(Self(Set::Avx2));
            if is_x86_feature_detected!("avx512f") {
                all.push(Self(Set::Avx512));
            }
        }
        all
    }

    /// `scalar`, `avx2` or `avx512`.
    pub const fn as_str(self) -> &'static str {
        match self.0 {
            Set::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Compiles a function that is generic over the lanes once per instruction set, and picks at run time.
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $generic:ident) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::kernels::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $generic::<$crate::kernels::lanes::Avx2>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $generic::<$crate::kernels::lanes::Avx512>($($arg),*)
            }
            match isa.0 {
                $crate::kernels::isa::Set::Scalar => $generic::<$crate::kernels::lanes::Scalar>($($arg),*),
                // SAFETY: a value of `Isa` exists only where the CPU has the instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::isa::Set::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::isa::Set::Avx512 => unsafe { avx512($($arg),*) },
            }
        }
    };
}

pub(super) use per_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_is_the_last() {
        assert_eq!(Isa::available()[0], Isa::SCALAR);
        assert_eq!(Isa::available().last(), Some(&Isa::detect()));
    }
}
