//! The tags `{% generation %}` and `{% endgeneration %}` of Hugging Face's templates: they mark,
//! for training, what the model writes.

use std::borrow::Cow;

/// A template without these tags, of the same lines: the template engine does not know them. What
/// is between them is rendered, and variables that are set there are not seen outside.
pub(crate) fn replaced(source: &str) -> Cow<'_, str> {
    if !source.contains("endgeneration") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    let mut is_raw = false;
    while let Some(at) = rest.find('{') {
        let opened = &rest[at..];
        if opened.starts_with("{#") && !is_raw {
            let end = opened[2..].find("#}").map_or(rest.len(), |end| at + 2 + end + "#}".len());
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        let Some(tag) = opened.strip_prefix("{%") else {
            out.push_str(&rest[..=at]);
            rest = &rest[at + 1..];
            continue;
        };
        let ahead = tag.len() - tag.trim_start_matches(is_ahead).len();
        let name = name(&tag[ahead..]);
        out.push_str(&rest[..at + "{%".len() + ahead]);
        out.push_str(match name {
            "generation" if !is_raw => "with",
            "endgeneration" if !is_raw => "endwith",
            name => name,
        });
        is_raw = name == "raw" || is_raw && name != "endraw";
        rest = &tag[ahead + name.len()..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// What stands between the beginning of a tag and its name.
fn is_ahead(character: char) -> bool {
    character.is_ascii_whitespace() || matches!(character, '-' | '+')
}

/// The name that a text begins with; may be empty.
fn name(text: &str) -> &str {
    let end = text.find(|character: char| !character.is_ascii_alphanumeric() && character != '_');
    &text[..end.unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::replaced;

    #[test]
    fn generation_tags_are_replaced_and_nothing_else() {
        let cases = [
            ("a{% generation %}b{% endgeneration %}c", "a{% with %}b{% endwith %}c"),
            ("{%- generation -%}\nb\n{%-endgeneration-%}", "{%- with -%}\nb\n{%-endwith-%}"),
            ("{%+generation%}{% endgeneration +%}", "{%+with%}{% endwith +%}"),
            (
                "{% if generation %}{{ generation }}{% endif %}{# {% endgeneration %} {% raw %} #}{% generation %}",
                "{% if generation %}{{ generation }}{% endif %}{# {% endgeneration %} {% raw %} #}{% with %}",
            ),
            (
                "{% raw %}{# {% endgeneration %}{% endraw %}{% endgeneration %}{# open",
                "{% raw %}{# {% endgeneration %}{% endraw %}{% endwith %}{# open",
            ),
            ("{% endgeneration", "{% endwith"),
            ("endgeneration {% add_generation_prompt %", "endgeneration {% add_generation_prompt %"),
        ];
        for (source, expected) in cases {
            assert_eq!(replaced(source), expected, "{source}");
        }
    }
}
