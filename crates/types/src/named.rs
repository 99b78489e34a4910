//! Names of an enum's variants: a test that lists what a shell carried out compares them with all
//! there are.

/// Gives an enum `ALL`, the names of its variants, and `name`. A variant that is not in the list
/// does not compile.
#[macro_export]
macro_rules! named {
    ($type:ident $(<$generic:ident>)?: $($variant:ident),+ $(,)?) => {
        impl $(<$generic>)? $type $(<$generic>)? {
            /// The names of all variants.
            pub const ALL: &[&str] = &[$(concat!(stringify!($type), "::", stringify!($variant))),+];

            /// The variant's name, one of [`Self::ALL`].
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant { .. } => concat!(stringify!($type), "::", stringify!($variant)),)+
                }
            }
        }
    };
}
