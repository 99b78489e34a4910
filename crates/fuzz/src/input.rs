//! Inputs that are several things.

/// Ends a part: a byte that no text has.
pub(crate) const END: u8 = 0xff;

/// The parts of an input; the last one has what is left.
pub(crate) fn parts<const N: usize>(input: &[u8]) -> [&[u8]; N] {
    let mut parts = input.splitn(N, |byte| *byte == END);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// An input of parts.
pub(crate) fn join(parts: &[&[u8]]) -> Vec<u8> {
    parts.join(&END)
}

/// The first byte, as a choice among `choices`, and what is left.
pub(crate) fn choice(input: &[u8], choices: usize) -> (usize, &[u8]) {
    input.split_first().map_or((0, input), |(first, rest)| (usize::from(*first) % choices, rest))
}

/// Text, as far as it is any.
pub(crate) fn text(input: &[u8]) -> &str {
    match std::str::from_utf8(input) {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&input[..error.valid_up_to()]).unwrap_or_default(),
    }
}
