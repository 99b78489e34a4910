//! Loops over registers, written out.

/// Repeats a body for each of some indices. The compiler leaves larger loops over registers rolled,
/// and the registers become memory.
macro_rules! unrolled {
    ($index:ident in $($value:literal)* => $body:expr) => {
        $({
            let $index: usize = $value;
            $body
        })*
    };
}

pub(super) use unrolled;
