//! Enums whose values have names on the command line.

/// Declares one, with `ALL`, `as_str` and `FromStr`.
macro_rules! named {
    ($(#[$head:meta])* $type:ident { $($(#[$doc:meta])* $value:ident = $name:literal,)* }) => {
        $(#[$head])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub enum $type { $($(#[$doc])* $value,)* }

        impl $type {
            /// Each of them.
            pub const ALL: &[Self] = &[$(Self::$value,)*];

            /// Its name on the command line.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$value => $name,)* }
            }
        }

        impl std::str::FromStr for $type {
            type Err = String;

            fn from_str(name: &str) -> Result<Self, Self::Err> {
                let known = Self::ALL.iter().find(|value| value.as_str() == name).copied();
                known.ok_or_else(|| format!("'{name}' is none of {}", [$($name,)*].join(", ")))
            }
        }
    };
}
pub(crate) use named;
