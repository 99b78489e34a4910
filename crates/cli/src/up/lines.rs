//! What children say on stdout: `PROGRESS 0.42 loading weights`, then once `READY {json}`.

use serde::Deserialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, BufReader};

/// The longest line kept; of a longer one the rest is dropped.
const MAX_LINE_BYTES: usize = 16 << 10;

/// Where a role listens, in its own words.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Ready {
    /// conductor, prefill or decode.
    pub role: String,
    /// `IP:PORT` of its gRPC services.
    pub grpc: String,
    /// `IP:PORT` of its HTTP port.
    pub http: Option<String>,
    /// `IP:PORT` of its transfer engine.
    pub transfer: Option<String>,
    /// `IP:PORT` of a conductor's port for operators, if it has one.
    pub operators: Option<String>,
    /// `IP:PORT` of a conductor's port for nodes, if it has one.
    pub nodes: Option<String>,
    /// Tokens of KV that a node holds.
    pub kv_tokens: Option<u64>,
    /// Most tokens of prompt and output together that a node holds.
    pub max_model_len: Option<u32>,
}

/// A line of a child's stdout.
#[derive(Debug, Clone, PartialEq)]
pub enum Line {
    /// It serves.
    Ready(Ready),
    /// How far it is, 0 to 1, and with what.
    Progress(f64, String),
    /// Something for the log.
    Other,
}

impl Line {
    /// What a line means; anything that does not have the form goes to the log.
    pub fn parse(text: &str) -> Self {
        let ready = text.strip_prefix("READY ").and_then(|json| serde_json::from_str(json).ok());
        ready.map(Self::Ready).or_else(|| Self::parse_progress(text)).unwrap_or(Self::Other)
    }

    fn parse_progress(text: &str) -> Option<Self> {
        let (done, what) = text.strip_prefix("PROGRESS ")?.split_once(' ')?;
        let done: f64 = done.parse().ok()?;
        (0.0..=1.0).contains(&done).then(|| Self::Progress(done, what.to_owned()))
    }
}

/// Lines of a pipe, each of bounded length.
pub struct Lines<R> {
    reader: BufReader<R>,
    buffer: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    /// Reads from `pipe`.
    pub fn new(pipe: R) -> Self {
        Self { reader: BufReader::new(pipe), buffer: Vec::new() }
    }

    /// The next line without its end; none when the pipe is closed.
    pub async fn next(&mut self) -> Option<String> {
        self.buffer.clear();
        loop {
            let read = self.reader.fill_buf().await.ok()?;
            if read.is_empty() && self.buffer.is_empty() {
                return None;
            }
            let end = read.iter().position(|&byte| byte == b'\n');
            let part = &read[..end.unwrap_or(read.len())];
            let room = MAX_LINE_BYTES - self.buffer.len();
            self.buffer.extend_from_slice(&part[..part.len().min(room)]);
            let used = part.len() + usize::from(end.is_some());
            let closed = read.is_empty();
            std::pin::Pin::new(&mut self.reader).consume(used);
            if end.is_some() || closed {
                return Some(String::from_utf8_lossy(&self.buffer).trim_end_matches('\r').to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_and_progress_lines_are_parsed_and_others_ignored() {
        let ready = Line::parse(
            r#"READY {"role":"conductor","node":null,"grpc":"127.0.0.1:1","http":"127.0.0.1:2","transfer":null}"#,
        );
        let Line::Ready(ready) = ready else { panic!("{ready:?}") };
        assert_eq!(
            (ready.grpc.as_str(), ready.http.as_deref(), ready.transfer),
            ("127.0.0.1:1", Some("127.0.0.1:2"), None)
        );
        assert_eq!(Line::parse("PROGRESS 0.42 loading weights"), Line::Progress(0.42, "loading weights".into()));
        for other in ["READY", "READY {}", "PROGRESS", "PROGRESS NaN x", "PROGRESS 2 x", "hello"] {
            assert_eq!(Line::parse(other), Line::Other, "{other}");
        }
    }

    #[tokio::test]
    async fn child_output_lines_are_bounded_and_last_needs_no_newline() {
        let long = "x".repeat(3 * MAX_LINE_BYTES);
        let text = format!("one\r\n\n{long}\nb\u{e9}");
        let mut lines = Lines::new(text.as_bytes());
        assert_eq!(lines.next().await.as_deref(), Some("one"));
        assert_eq!(lines.next().await.as_deref(), Some(""));
        assert_eq!(lines.next().await.map(|line| line.len()), Some(MAX_LINE_BYTES));
        assert_eq!(lines.next().await.as_deref(), Some("b\u{e9}"));
        assert_eq!(lines.next().await, None);
    }
}
