//! Clients of the conductor.

use std::net::SocketAddr;

use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt;
use baton_proto::v1::generate_response::Event;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

use super::world::soon;

/// A request for so many tokens.
pub fn request(prompt: &str, max_tokens: u32) -> v1::GenerateRequest {
    let text = v1::TextPrompt { text: prompt.into(), parse_special: false };
    let sampling = v1::SamplingParameters { max_tokens: Some(max_tokens), ..Default::default() };
    v1::GenerateRequest { prompt: Some(Prompt::Text(text)), sampling: Some(sampling), ..Default::default() }
}

pub fn connect(address: SocketAddr, change: impl FnOnce(Endpoint) -> Endpoint) -> Channel {
    change(Endpoint::from_shared(format!("http://{address}")).unwrap()).connect_lazy()
}

/// Status and whole answer of an HTTP request; with a body it is a POST.
pub fn http(address: SocketAddr, path: &str, body: &str) -> JoinHandle<(u16, String)> {
    http_with(address, path, &[], body)
}

/// With these headers.
pub fn http_with(address: SocketAddr, path: &str, more: &[(&str, &str)], body: &str) -> JoinHandle<(u16, String)> {
    let method = if body.is_empty() { "GET" } else { "POST" };
    let length = body.len();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n");
    let head = format!("{head}content-type: application/json\r\ncontent-length: {length}\r\n");
    let more: String = more.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let message = format!("{head}{more}\r\n{body}");
    tokio::spawn(async move {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(message.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        (answer.split(' ').nth(1).unwrap().parse().unwrap(), answer)
    })
}

/// Sends a request, whose answer may take its time.
pub fn ask(
    mut client: v1::inference_client::InferenceClient<Channel>,
    request: v1::GenerateRequest,
) -> JoinHandle<Result<Answer, Status>> {
    tokio::spawn(async move {
        let stream = client.generate(request).await?.into_inner();
        Ok(Answer { stream, tokens: String::new(), text: String::new(), id: String::new() })
    })
}

/// An answer as far as its client has read it.
pub struct Answer {
    stream: Streaming<v1::GenerateResponse>,
    /// Each token is a character.
    pub tokens: String,
    pub text: String,
    pub id: String,
}

impl Answer {
    /// The next message. Tokens come in order, and each once.
    pub async fn event(&mut self) -> Result<Option<Event>, Status> {
        let Some(response) = soon(self.stream.message()).await? else { return Ok(None) };
        match &response.event {
            Some(Event::Accepted(accepted)) => self.id.clone_from(&accepted.request_id),
            Some(Event::Delta(delta)) => {
                assert_eq!(delta.index as usize, self.tokens.len());
                self.tokens.extend(delta.token_ids.iter().map(|token| char::from_u32(*token).unwrap()));
                self.text.push_str(&delta.text);
            }
            _ => {}
        }
        Ok(response.event)
    }

    /// Reads until it has these tokens, which are all so far.
    pub async fn reads(&mut self, tokens: &str) {
        while self.tokens.len() < tokens.len() {
            self.event().await.unwrap().expect("more tokens come");
        }
        assert_eq!(self.tokens, tokens);
    }

    /// Reads to its end.
    pub async fn end(&mut self) -> Result<v1::Finished, Status> {
        let mut finished = None;
        while let Some(event) = self.event().await? {
            if let Event::Finished(last) = event {
                finished = Some(*last);
            }
        }
        Ok(finished.expect("it is finished"))
    }
}
