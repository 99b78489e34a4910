//! Log-probabilities, for people.

use baton_proto::v1;

use crate::report::Record;
use crate::screen::Paint;
use crate::table::table;

/// A table of the prompt's tokens and one of the output's, if they were asked for.
pub fn render(record: &Record, paint: Paint) -> Option<String> {
    let tables =
        [of("PROMPT TOKEN", record.prompt_token_logprobs(), paint), of("TOKEN", record.token_logprobs(), paint)];
    let tables: Vec<_> = tables.into_iter().flatten().collect();
    (!tables.is_empty()).then(|| tables.join("\n\n"))
}

fn of<'a>(
    title: &str,
    positions: impl Iterator<Item = (Option<u32>, &'a v1::TokenLogprobs)>,
    paint: Paint,
) -> Option<String> {
    let rows: Vec<_> = positions.map(|(token, logprobs)| row(token, logprobs)).collect();
    let told = !rows.is_empty();
    told.then(|| table(&[title, "LOGPROB", "ALTERNATIVES"], &rows, paint, |_, _, cell| cell.to_owned()))
}

fn row(token: Option<u32>, logprobs: &v1::TokenLogprobs) -> Vec<String> {
    let alternative =
        |top: &v1::TopLogprob| format!("{} {:.3}", name(top.token_id, &top.text, &top.token_bytes), top.logprob);
    vec![
        token.map_or_else(none, |id| name(id, &logprobs.text, &logprobs.token_bytes)),
        logprobs.logprob.map_or_else(none, |logprob| format!("{logprob:.3}")),
        logprobs.top.iter().map(alternative).collect::<Vec<_>>().join("  "),
    ]
}

/// A token's text, quoted: blanks count, and control characters must not reach the terminal. Its
/// number if it has none, its bytes if it is part of a character.
fn name(id: u32, text: &str, token_bytes: &[u8]) -> String {
    match (text, token_bytes) {
        ("", _) => format!("#{id}"),
        (text, []) => format!("{text:?}"),
        (_, bytes) => format!("\"{}\"", bytes.escape_ascii()),
    }
}

fn none() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_proto::v1::generate_response::Event;

    use super::*;

    fn logprobs(text: &str, logprob: Option<f32>, top: &[(u32, &str, f32)]) -> v1::TokenLogprobs {
        let top = top.iter().map(|(token_id, text, logprob)| v1::TopLogprob {
            token_id: *token_id,
            logprob: *logprob,
            text: (*text).into(),
            ..Default::default()
        });
        v1::TokenLogprobs { logprob, top: top.collect(), text: text.into(), ..Default::default() }
    }

    fn record(events: Vec<Event>) -> Record {
        let mut record = Record::default();
        for event in events {
            record.take(v1::GenerateResponse { event: Some(event), completion: 0 }, Duration::ZERO).unwrap();
        }
        record
    }

    #[test]
    fn logprobs_table_has_a_row_per_token_with_alternatives() {
        let delta = v1::Delta {
            index: 0,
            token_ids: vec![7, 8, 9],
            logprobs: vec![
                logprobs(" Paris", Some(-0.0123), &[(7, " Paris", -0.0123), (3, " the", f32::NEG_INFINITY)]),
                logprobs("\x1b\n", Some(-1.0), &[]),
                logprobs("", Some(-2.0), &[]),
            ],
            text: " Paris".into(),
            ..Default::default()
        };
        let text = render(&record(vec![Event::Delta(delta)]), Paint::none()).unwrap();
        let expected = r#"
TOKEN       LOGPROB  ALTERNATIVES
" Paris"    -0.012   " Paris" -0.012  " the" -inf
"\u{1b}\n"  -1.000
#9          -2.000"#;
        assert_eq!(text, expected.trim_start());
    }

    #[test]
    fn prompt_logprobs_rows_are_named_by_the_token_that_follows() {
        let accepted = v1::Accepted { prompt_token_ids: vec![1, 2], ..Default::default() };
        let positions = vec![logprobs("b", Some(-0.5), &[(2, "b", -0.5)]), logprobs("", None, &[(4, "c", -0.25)])];
        let events = vec![Event::Accepted(accepted), Event::PromptLogprobs(v1::PromptLogprobs { positions })];
        let expected = "PROMPT TOKEN  LOGPROB  ALTERNATIVES\n\"b\"           -0.500   \"b\" -0.500\n-             -        \"c\" -0.250";
        assert_eq!(render(&record(events), Paint::none()).unwrap(), expected);
    }

    #[test]
    fn logprobs_table_is_not_shown_unless_requested() {
        let delta = v1::Delta { token_ids: vec![7], text: "x".into(), ..Default::default() };
        assert_eq!(render(&record(vec![Event::Delta(delta)]), Paint::none()), None);
    }
}
