//! Which tokens end an output.

use baton_types::TokenId;

/// Names of special tokens that end a turn or a text in the families that Baton runs. Files name
/// one end token; a model tuned for chat often ends its turn with another.
const END_NAMES: [&str; 8] =
    ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>"];

/// The tokens that the files name, in their order, and then those known by name.
pub(crate) fn end_tokens<'a>(
    named: impl IntoIterator<Item = TokenId>,
    special: impl IntoIterator<Item = (&'a str, TokenId)>,
) -> Vec<TokenId> {
    let known = special.into_iter().filter(|(text, _)| END_NAMES.contains(text)).map(|(_, id)| id);
    let mut ids = Vec::new();
    for id in named.into_iter().chain(known) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_tokens_of_the_file_come_first_without_duplicates() {
        assert_eq!(end_tokens([7, 2], [("<|im_end|>", 2), ("<|user|>", 3), ("<|eot_id|>", 4)]), [7, 2, 4]);
    }
}
