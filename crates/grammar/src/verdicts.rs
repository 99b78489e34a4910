//! What came of checks: the same schema is not checked twice in a row.

use std::collections::VecDeque;

use crate::{CheckedGrammar, GrammarError};

/// Most that are remembered.
const MAX_VERDICTS: usize = 256;
/// Most bytes of them together, and of one.
const MAX_BYTES: usize = 4 << 20;
const MAX_BYTES_EACH: usize = 128 << 10;

/// Names an answer's forms, and what is around them.
pub(crate) type Digest = [u8; 32];
/// What came of a check; `None`: any answer will do.
pub(crate) type Verdict = Result<Option<CheckedGrammar>, GrammarError>;

/// The last verdicts, those asked for last first.
#[derive(Debug, Default)]
pub(crate) struct Verdicts {
    kept: VecDeque<(Digest, Verdict)>,
    bytes: usize,
}

fn bytes(verdict: &Verdict) -> usize {
    match verdict {
        Ok(None) => 0,
        Ok(Some(grammar)) => grammar.text.len() + grammar.dropped.iter().map(String::len).sum::<usize>(),
        Err(error) => error.to_string().len(),
    }
}

impl Verdicts {
    pub(crate) fn of(&mut self, digest: &Digest) -> Option<Verdict> {
        let position = self.kept.iter().position(|(other, _)| other == digest)?;
        let found = self.kept.remove(position)?;
        let verdict = found.1.clone();
        self.kept.push_front(found);
        Some(verdict)
    }

    pub(crate) fn remember(&mut self, digest: Digest, verdict: &Verdict) {
        let size = bytes(verdict);
        // Two that were checked at once are remembered once.
        if size > MAX_BYTES_EACH || self.of(&digest).is_some() {
            return;
        }
        self.bytes += size;
        self.kept.push_front((digest, verdict.clone()));
        while self.kept.len() > MAX_VERDICTS || self.bytes > MAX_BYTES {
            let Some((_, oldest)) = self.kept.pop_back() else { return };
            self.bytes -= bytes(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_bounded_in_number_and_bytes() {
        let mut verdicts = Verdicts::default();
        let digest = |n: u32| {
            let mut digest = [0; 32];
            digest[..4].copy_from_slice(&n.to_le_bytes());
            digest
        };
        let refused = |bytes: usize| Err(GrammarError::Invalid("x".repeat(bytes)));
        for n in 0..1000 {
            verdicts.remember(digest(n), &refused(10));
            assert_eq!(verdicts.of(&digest(0)), Some(refused(10)), "one that is asked for stays");
        }
        assert_eq!((verdicts.kept.len(), verdicts.bytes), (MAX_VERDICTS, MAX_VERDICTS * 10));
        assert_eq!((verdicts.of(&digest(700)), verdicts.of(&digest(999))), (None, Some(refused(10))));
        verdicts.remember(digest(5000), &refused(MAX_BYTES_EACH + 1));
        assert_eq!(verdicts.of(&digest(5000)), None);
        for n in 6000..6100 {
            verdicts.remember(digest(n), &refused(MAX_BYTES_EACH));
            let sum: usize = verdicts.kept.iter().map(|(_, it)| bytes(it)).sum();
            assert!(verdicts.bytes <= MAX_BYTES && verdicts.bytes == sum);
        }
        assert_eq!(verdicts.kept.len(), MAX_BYTES / MAX_BYTES_EACH);
    }
}
