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

/// Ends a step: two bytes that numbers of messages rarely have.
const STEP_END: &[u8] = b"\xff\0";
/// Most steps of an input.
const MAX_STEPS: usize = 64;

/// The steps of an input, each with the choice of its first byte.
pub(crate) fn steps(input: &[u8], choices: usize) -> impl Iterator<Item = (usize, &[u8])> {
    let mut rest = Some(input);
    let next = move || {
        let left = rest?;
        let end = left.windows(STEP_END.len()).position(|bytes| bytes == STEP_END);
        rest = end.map(|end| &left[end + STEP_END.len()..]);
        Some(choice(end.map_or(left, |end| &left[..end]), choices))
    };
    std::iter::from_fn(next).take(MAX_STEPS)
}

/// An input of steps.
pub(crate) fn join_steps(steps: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let steps: Vec<_> = steps.iter().map(|(choice, bytes)| [&[*choice], &bytes[..]].concat()).collect();
    steps.join(STEP_END)
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
