//! Server-sent events, as they come out of a connection: in pieces of any size.

/// Longest event taken, bytes.
const MAX_EVENT_BYTES: usize = 1 << 20;

/// Puts events together (WHATWG HTML, 9.2.6). Only their data counts here: names, ids and comments
/// are skipped.
#[derive(Debug, Default)]
pub struct SseReader {
    /// A line that has not ended.
    line: Vec<u8>,
    /// Data of the event that has not ended.
    data: String,
}

impl SseReader {
    /// Takes bytes in, and gives the data of each event that they end.
    ///
    /// # Errors
    /// An event is longer than 1 MiB.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, String> {
        let mut events = Vec::new();
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            self.line.extend_from_slice(part);
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                return Err(format!("an event of more than {MAX_EVENT_BYTES} bytes"));
            }
            if part.ends_with(b"\n") {
                events.extend(self.end_line());
            }
        }
        Ok(events)
    }

    /// A line is whole; an empty one ends the event.
    fn end_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        let line = String::from_utf8_lossy(&line);
        let line = line.trim_end_matches(['\n', '\r']);
        if line.is_empty() {
            return Some(std::mem::take(&mut self.data)).filter(|data| !data.is_empty());
        }
        if let Some(data) = line.strip_prefix("data:") {
            if !self.data.is_empty() {
                self.data.push('\n');
            }
            self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str]) -> Vec<String> {
        let mut reader = SseReader::default();
        pieces.iter().flat_map(|piece| reader.push(piece.as_bytes()).unwrap()).collect()
    }

    #[test]
    fn sse_events_are_the_same_for_any_chunking() {
        let whole = "data: {\"a\": 1}\n\ndata: b\n\ndata: [DONE]\n\n";
        let expected = ["{\"a\": 1}", "b", "[DONE]"];
        assert_eq!(read(&[whole]), expected);
        for cut in 1..whole.len() {
            assert_eq!(read(&[&whole[..cut], &whole[cut..]]), expected, "cut at {cut}");
        }
        let bytes: Vec<_> = whole.split("").collect();
        assert_eq!(read(&bytes), expected);
    }

    #[test]
    fn sse_comments_and_field_names_are_skipped() {
        let text =
            ": ping\r\n\r\nevent: x\r\nid: 7\r\ndata:one\r\n:\r\ndata: two\r\n\r\n\r\nretry: 5\r\n\r\ndata: é\r\n\r\n";
        assert_eq!(read(&[text]), ["one\ntwo", "é"]);
        for cut in (1..text.len()).filter(|cut| text.is_char_boundary(*cut)) {
            assert_eq!(read(&[&text[..cut], &text[cut..]]), ["one\ntwo", "é"], "cut at {cut}");
        }
    }

    #[test]
    fn sse_event_without_end_is_dropped_or_refused_over_limit() {
        assert!(read(&["data: x", "\n"]).is_empty());
        let mut reader = SseReader::default();
        let line = vec![b'x'; MAX_EVENT_BYTES / 2 + 1];
        assert!(reader.push(&line).is_ok());
        assert!(reader.push(&line).unwrap_err().contains("1048576 bytes"));
    }
}
