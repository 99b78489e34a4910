//! Which instruction set the kernels run with.

use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Set {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Vnni,
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

    /// The one that `BATON_ISA` names, else the fastest.
    ///
    /// # Errors
    /// What is wrong with the name, and which there are.
    pub(crate) fn from_environment() -> Result<Self, String> {
        let Some(name) = std::env::var_os("BATON_ISA") else { return Ok(Self::detect()) };
        let available = Self::available();
        let found = available.iter().find(|isa| name == isa.as_str());
        found.copied().ok_or_else(|| {
            let names: Vec<_> = available.iter().map(|isa| isa.as_str()).collect();
            format!("{name:?}, but this CPU has {}", names.join(", "))
        })
    }

    /// All of them, slowest first.
    pub fn available() -> Vec<Self> {
        #[allow(unused_mut)] // other architectures have one
        let mut all = vec![Self::SCALAR];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            all.push(Self(Set::Avx2));
            if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
                all.push(Self(Set::Avx512));
                if is_x86_feature_detected!("avx512vnni") {
                    all.push(Self(Set::Vnni));
                }
            }
        }
        all
    }

    /// `scalar`, `avx2`, `avx512` or `vnni`.
    pub const fn as_str(self) -> &'static str {
        match self.0 {
            Set::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Vnni => "vnni",
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
                $crate::kernels::isa::Set::Avx512 | $crate::kernels::isa::Set::Vnni => unsafe { avx512($($arg),*) },
            }
        }
    };
}

pub(super) use per_isa;

/// As `per_isa!`, for functions that are generic over integer dot products.
macro_rules! per_dots {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $generic:ident) => {
        $(#[$doc])*
        $vis fn $name(isa: $crate::kernels::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $generic::<$crate::kernels::dots::Avx2Dots>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw")]
            fn avx512($($arg: $ty),*) $(-> $ret)? {
                $generic::<$crate::kernels::dots::Avx512Dots>($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vnni")]
            fn vnni($($arg: $ty),*) $(-> $ret)? {
                $generic::<$crate::kernels::dots::VnniDots>($($arg),*)
            }
            match isa.0 {
                $crate::kernels::isa::Set::Scalar => $generic::<$crate::kernels::dots::ScalarDots>($($arg),*),
                // SAFETY: a value of `Isa` exists only where the CPU has the instructions.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::isa::Set::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::isa::Set::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::kernels::isa::Set::Vnni => unsafe { vnni($($arg),*) },
            }
        }
    };
}

pub(super) use per_dots;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_is_the_last() {
        assert_eq!(Isa::available()[0], Isa::SCALAR);
        assert_eq!(Isa::available().last(), Some(&Isa::detect()));
    }
}
