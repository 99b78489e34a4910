//! Which instruction set the kernels run with.

use std::fmt;
use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use super::amx;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Set {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Vnni,
    #[cfg(target_arch = "x86_64")]
    Bf16,
    #[cfg(target_arch = "x86_64")]
    Amx,
}

/// An instruction set that this CPU has: a value of this type is the proof. All sets give the same
/// bits, sums of bfloat16 below the smallest normal f32 apart (see `pairs`). The exception has
/// matrix tiles: its products of bfloat16 are another KV compatibility class.
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

    /// The one that `BATON_ISA` names, else the fastest. A variable that is empty is not set.
    ///
    /// # Errors
    /// What is wrong with the name, and which there are.
    pub(crate) fn from_environment() -> Result<Self, String> {
        let named = std::env::var_os("BATON_ISA").filter(|name| !name.is_empty());
        let Some(name) = named else { return Ok(Self::detect()) };
        let available = Self::available();
        let found = available.iter().find(|isa| name == isa.as_str());
        found.copied().ok_or_else(|| {
            let names: Vec<_> = available.iter().map(|isa| isa.as_str()).collect();
            format!("{name:?}, but this CPU has {}", names.join(", "))
        })
    }

    /// The one that `BATON_ISA` names, else the fastest, found once: for what belongs to no engine.
    /// An engine is not loaded if the name is wrong.
    pub(crate) fn of_process() -> Self {
        static FOUND: OnceLock<Isa> = OnceLock::new();
        *FOUND.get_or_init(|| Self::from_environment().unwrap_or_else(|_| Self::detect()))
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
                    if is_x86_feature_detected!("avx512bf16") {
                        all.push(Self(Set::Bf16));
                        if amx::allowed() {
                            all.push(Self(Set::Amx));
                        }
                    }
                }
            }
        }
        all
    }

    /// Whether products of bfloat16 go by matrix tiles, and so in another order of summation.
    pub(crate) const fn has_tiles(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return matches!(self.0, Set::Amx);
        #[cfg(not(target_arch = "x86_64"))]
        false
    }

    /// `scalar`, `avx2`, `avx512`, `vnni` (AVX-512 with VNNI), `bf16` (that with BF16) or `amx`
    /// (that with tiles).
    pub const fn as_str(self) -> &'static str {
        match self.0 {
            Set::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Vnni => "vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Bf16 => "bf16",
            #[cfg(target_arch = "x86_64")]
            Set::Amx => "amx",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Compiles a function that is generic over one of a set's capabilities, once per instruction set
/// that differs in it, and picks at run time:
///
/// ```text
/// fn f(..) = f_of<Floats>     f_of::<V: F32x16>     sixteen floats
///                <Dots>       f_of::<D: Dots>       integer dot products
///                <Pairs>      f_of::<P: Pairs>      products of pairs of bfloat16
///                <Singles>    f_of::<P: Pairs>      the same of single precision
/// ```
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($args:tt)*) $(-> $ret:ty)? = $generic:ident<Floats>) => {
        $crate::kernels::isa::compiled! { [$(#[$doc])* $vis] $name ($($args)*) ($($ret)?) ($($args)* => $($ret)?) $generic $crate::kernels::lanes::Scalar;
            Avx2 => "avx2,fma,f16c", $crate::kernels::lanes::Avx2;
            Avx512 | Vnni | Bf16 | Amx => "avx2,fma,f16c,avx512f,avx512bw", $crate::kernels::lanes::Avx512;
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($args:tt)*) $(-> $ret:ty)? = $generic:ident<Dots>) => {
        $crate::kernels::isa::compiled! { [$(#[$doc])* $vis] $name ($($args)*) ($($ret)?) ($($args)* => $($ret)?) $generic $crate::kernels::dots::ScalarDots;
            Avx2 => "avx2,fma,f16c", $crate::kernels::dots::Avx2Dots;
            Avx512 => "avx2,fma,f16c,avx512f,avx512bw", $crate::kernels::dots::Avx512Dots;
            Vnni | Bf16 | Amx => "avx2,fma,f16c,avx512f,avx512bw,avx512vnni", $crate::kernels::dots::VnniDots;
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($args:tt)*) $(-> $ret:ty)? = $generic:ident<Pairs>) => {
        $crate::kernels::isa::compiled! { [$(#[$doc])* $vis] $name ($($args)*) ($($ret)?) ($($args)* => $($ret)?) $generic $crate::kernels::pairs::Widened<$crate::kernels::lanes::Scalar>;
            Avx2 => "avx2,fma,f16c", $crate::kernels::pairs::Widened<$crate::kernels::lanes::Avx2>;
            Avx512 | Vnni => "avx2,fma,f16c,avx512f,avx512bw", $crate::kernels::pairs::Widened<$crate::kernels::lanes::Avx512>;
            Bf16 => "avx2,fma,f16c,avx512f,avx512bw,avx512bf16", $crate::kernels::pairs::Native<false>;
            Amx => "avx2,fma,f16c,avx512f,avx512bw,avx512bf16", $crate::kernels::pairs::Native<true>;
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($args:tt)*) $(-> $ret:ty)? = $generic:ident<Singles>) => {
        $crate::kernels::isa::compiled! { [$(#[$doc])* $vis] $name ($($args)*) ($($ret)?) ($($args)* => $($ret)?) $generic $crate::kernels::pairs::Single<$crate::kernels::lanes::Scalar, f32>;
            Avx2 => "avx2,fma,f16c", $crate::kernels::pairs::Single<$crate::kernels::lanes::Avx2, f32>;
            Avx512 | Vnni | Bf16 | Amx => "avx2,fma,f16c,avx512f,avx512bw", $crate::kernels::pairs::Single<$crate::kernels::lanes::Avx512, f32>;
        }
    };
}

/// The function that `per_isa!` asks for: the scalar type first, then which sets have which
/// instructions and which type. The signature comes twice, the second time as a whole: what is
/// repeated per argument cannot be repeated per set.
macro_rules! compiled {
    ([$($head:tt)*] $name:ident ($($arg:ident: $ty:ty),* $(,)?) ($($ret:ty)?) $signature:tt $generic:ident $scalar:ty;
     $($($set:ident)|+ => $features:literal, $vector:ty;)+) => {
        $($head)* fn $name(isa: $crate::kernels::Isa, $($arg: $ty),*) $(-> $ret)? {
            match isa.0 {
                $crate::kernels::isa::Set::Scalar => $generic::<$scalar>($($arg),*),
                $(
                    #[cfg(target_arch = "x86_64")]
                    $($crate::kernels::isa::Set::$set)|+ => {
                        $crate::kernels::isa::with_features!($features, $generic, $vector, $signature)
                    }
                )+
            }
        }
    };
}

/// Calls a function compiled for some instructions.
macro_rules! with_features {
    ($features:literal, $generic:ident, $vector:ty, ($($arg:ident: $ty:ty),* $(,)? => $($ret:ty)?)) => {{
        #[target_feature(enable = $features)]
        fn vector($($arg: $ty),*) $(-> $ret)? {
            $generic::<$vector>($($arg),*)
        }
        // SAFETY: a value of `Isa` exists only if the CPU has the instructions.
        unsafe { vector($($arg),*) }
    }};
}

pub(super) use {compiled, per_isa, with_features};

#[cfg(test)]
mod tests {
    use std::process::{Command, Output};

    use super::*;

    #[test]
    fn detected_isa_is_the_last_available_one() {
        assert_eq!(Isa::available()[0], Isa::SCALAR);
        assert_eq!(Isa::available().last(), Some(&Isa::detect()));
    }

    #[test]
    #[ignore = "the other process of the test here, which starts it itself"]
    fn other_process() {
        println!("of the process: {}", Isa::of_process());
    }

    /// The sampler has no engine to ask (`tests/environment.rs` asks those).
    #[test]
    fn baton_isa_variable_chooses_the_isa_of_the_process() {
        let of_child = |name: &str| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "kernels::isa::tests::other_process", "--ignored", "--nocapture"]);
            let Output { status, stdout, .. } = command.env("BATON_ISA", name).output().unwrap();
            assert!(status.success(), "{name}: {status}");
            String::from_utf8(stdout).unwrap()
        };
        for isa in Isa::available() {
            let said = of_child(isa.as_str());
            assert!(said.contains(&format!("of the process: {isa}\n")), "{isa}: {said}");
        }
        let said = of_child("sse9");
        assert!(said.contains(&format!("of the process: {}\n", Isa::detect())), "{said}");
    }
}
