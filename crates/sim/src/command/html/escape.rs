//! Text that stands in a page.

/// The text, with the characters that mean something in HTML written out. Fit for content and for quoted attributes.
pub(super) fn escape(text: &str) -> String {
    let written = |c: char| match c {
        '&' => "&amp;".to_owned(),
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '"' => "&quot;".to_owned(),
        '\'' => "&#39;".to_owned(),
        _ => c.to_string(),
    };
    text.chars().map(written).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_means_something_is_left() {
        assert_eq!(escape("<b a=\"1\" c='2'>&é"), "&lt;b a=&quot;1&quot; c=&#39;2&#39;&gt;&amp;é");
    }
}
