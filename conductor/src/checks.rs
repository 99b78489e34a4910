//! Where requests are checked: what may take long, on threads of its own, and so much of it at
//! once.

use std::sync::Arc;

use baton_grammar::Effort;
use baton_proto::v1;
use baton_proto::v1::generate_request::Prompt;
use baton_runtime::{Phase, Shutdown, random_u64};
use baton_scheduler::{RequestError, SequenceLimits};
use baton_types::ErrorKind;
use prost::Message;

use crate::error::GenerateError;
use crate::keyed;
use crate::nodes::MAX_LOOKUPS;
use crate::prompt::{CheckedRequest, Grammared, TextModel};
use crate::turns::{Client, Gate};

/// Prompts up to this many bytes are tokenized on the spot if they are no messages: handing them to
/// another thread would take longer. Whatever is larger does not delay what is not.
const SMALL_BYTES: usize = 2048;

/// Texts of requests larger than this are checked two at a time: a tokenizer takes up to 200 bytes
/// for each byte of text.
const LARGE_BYTES: usize = 64 << 10;
const LARGE_TURNS: usize = 2;
/// Most turns of a kind, however many processors there are.
const MAX_TURNS: usize = 16;

/// How much of what may take long, and takes memory, is done at once.
pub fn turns() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).min(MAX_TURNS)
}

/// Threads for all turns, and for what else may block. The allocator has a heap for each.
pub fn blocking_threads() -> usize {
    const OTHERS: usize = 4;
    // Bodies are read, small messages rendered, prompts tokenized, both kinds of grammars compiled.
    turns() * 5 + LARGE_TURNS + MAX_LOOKUPS + OTHERS
}

/// The turns of what may take long.
pub struct Checks {
    /// Turns at small messages. No time bounds a chat template, which compares texts of any length
    /// in one instruction: the async threads do not wait for it.
    rendering: Gate,
    tokenizing: Gate,
    /// Turns at large requests: those that are not do not wait for them.
    large: Gate,
    /// Turns at grammars that cost little, as far as can be seen. What is found to cost more than
    /// that is tried again in the others, so those do not delay what costs little.
    small_grammars: Gate,
    /// Fewer, and of their own: neither prompts nor the async threads wait for a grammar.
    grammars: Gate,
}

impl Default for Checks {
    fn default() -> Self {
        let few = (turns() / 2).max(1);
        Self {
            rendering: Gate::new(turns()),
            tokenizing: Gate::new(turns()),
            large: Gate::new(LARGE_TURNS),
            small_grammars: Gate::new(few),
            grammars: Gate::new(few),
        }
    }
}

impl Checks {
    /// Checks a request, tokenizes its prompt and compiles its grammar.
    pub async fn check(
        &self,
        model: &Arc<TextModel>,
        client: Client,
        request: v1::GenerateRequest,
        limits: SequenceLimits,
        shutdown: &Shutdown,
    ) -> Result<CheckedRequest, GenerateError> {
        // One that is asked for again, at another conductor, has the same tokens.
        let key = &request.idempotency_key;
        let seed = if key.is_empty() { random_u64() } else { keyed::seed(key) };
        let gate = self.gate(&request);
        let tokenize = {
            let model = Arc::clone(model);
            move || model.with_grammar(model.tokenized(request, limits, seed)?, Effort::Known)
        };
        let mut checked = match gate {
            Some(gate) => in_turn(gate, client, shutdown, tokenize).await?,
            None => tokenize()?,
        };
        for (gate, effort) in [(&self.small_grammars, Effort::Small), (&self.grammars, Effort::Full)] {
            match checked {
                Grammared::Checked(checked) => return Ok(*checked),
                Grammared::Costly(request) => {
                    let model = Arc::clone(model);
                    let compile = move || model.with_grammar(*request, effort);
                    checked = in_turn(gate, client, shutdown, compile).await?;
                }
            }
        }
        match checked {
            Grammared::Checked(checked) => Ok(*checked),
            Grammared::Costly(_) => Err(failed()),
        }
    }

    /// Where a request waits to be tokenized; `None` if it is tokenized on the spot.
    fn gate(&self, request: &v1::GenerateRequest) -> Option<&Gate> {
        let bytes = request.encoded_len();
        if bytes > LARGE_BYTES {
            return Some(&self.large);
        }
        if bytes > SMALL_BYTES {
            return Some(&self.tokenizing);
        }
        matches!(request.prompt, Some(Prompt::Messages(_))).then_some(&self.rendering)
    }
}

async fn in_turn<T: Send + 'static>(
    gate: &Gate,
    client: Client,
    shutdown: &Shutdown,
    work: impl FnOnce() -> Result<T, GenerateError> + Send + 'static,
) -> Result<T, GenerateError> {
    let turn = tokio::select! {
        biased;
        turn = gate.turn(client) => turn.ok_or_else(|| GenerateError::overloaded("too many requests wait to be checked"))?,
        // A queue of grammars could take longer than the grace period, and nothing is lost yet.
        () = shutdown.wait_for(Phase::Draining) => return Err(RequestError::GoingDown.into()),
    };
    let working = tokio::task::spawn_blocking(move || {
        // Kept until the work is over, even if the client has gone away.
        let _turn = turn;
        work()
    });
    working.await.unwrap_or_else(|panic| {
        tracing::error!(%panic, "checking a request failed");
        Err(failed())
    })
}

fn failed() -> GenerateError {
    let message = "checking the request failed".to_owned();
    GenerateError::Frontend { kind: ErrorKind::Internal, message, retry_after: None }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_proto::v1::structured_output::Form;

    use super::*;
    use crate::prompt::tests::{LIMITS, model, text};

    /// With a prompt of so many bytes.
    fn request(bytes: usize, form: Option<Form>) -> v1::GenerateRequest {
        let structured_output = form.map(|form| v1::StructuredOutput { form: Some(form) });
        let sampling = v1::SamplingParameters { structured_output, ..Default::default() };
        v1::GenerateRequest { sampling: Some(sampling), ..text(&"x".repeat(bytes)) }
    }

    #[tokio::test]
    async fn tokenizing_and_grammar_compiling_do_not_block_each_other() {
        let model = Arc::new(model());
        let one = || Gate::new(1);
        let checks =
            Checks { rendering: one(), tokenizing: one(), large: one(), small_grammars: one(), grammars: one() };
        let limits = SequenceLimits { sequence: 5000, prompt: 4999, prompt_soon: 4999, context_length: 5000, ..LIMITS };
        let shutdown = Shutdown::new();
        let check = async |bytes, form| {
            let checking = checks.check(&model, Client, request(bytes, form), limits, &shutdown);
            tokio::time::timeout(Duration::from_millis(500), checking).await.ok()
        };
        let regex = |regex: &str| Some(Form::Regex(regex.into()));
        let form = || regex("[0-9]+");
        let compiling = checks.small_grammars.turn(Client).await;
        assert!(
            check(3000, None).await.is_some_and(|it| it.is_ok()) && check(10, None).await.is_some_and(|it| it.is_ok())
        );
        assert!(check(10, form()).await.is_none() && check(3000, form()).await.is_none());
        // A request that waits for its grammar keeps no other one from being tokenized, nor does
        // one whose client has left.
        let (with, without) = tokio::join!(check(3000, form()), check(3000, None));
        assert!(with.is_none() && without.is_some_and(|it| it.is_ok()));
        drop(compiling);
        let tokenizing = checks.tokenizing.turn(Client).await;
        assert!(check(10, form()).await.is_some_and(|it| it.unwrap().sampling.grammar.is_some()));
        assert!(check(3000, None).await.is_none());
        drop(tokenizing);
        // On the way down, who has to wait is told so, and who need not is served.
        shutdown.advance(Phase::Draining);
        assert!(check(3000, form()).await.is_some_and(|it| it.unwrap().sampling.grammar.is_some()));
        let _compiling = checks.small_grammars.turn(Client).await;
        assert!(check(10, regex("[a-z]+")).await.is_some_and(|it| it.unwrap_err().to_string().contains("going down")));
    }

    #[tokio::test]
    async fn messages_are_never_rendered_on_the_async_threads() {
        let model = Arc::new(model());
        let checks = Checks { rendering: Gate::new(1), ..Checks::default() };
        let shutdown = Shutdown::new();
        let check = async |request| {
            let checking = checks.check(&model, Client, request, LIMITS, &shutdown);
            tokio::time::timeout(Duration::from_millis(500), checking).await.ok()
        };
        let messages = || {
            let message = v1::ChatMessage { role: "user".into(), content: "x".into(), ..Default::default() };
            let prompt = v1::MessagesPrompt { messages: vec![message], ..Default::default() };
            v1::GenerateRequest { prompt: Some(Prompt::Messages(prompt)), ..Default::default() }
        };
        // A template that does not end.
        let rendering = checks.rendering.turn(Client).await;
        assert!(check(messages()).await.is_none());
        let ids = v1::TokenIds { ids: vec![1] };
        let ids = v1::GenerateRequest { prompt: Some(Prompt::TokenIds(ids)), ..Default::default() };
        assert!(check(text("x")).await.is_some_and(|it| it.is_ok()) && check(ids).await.is_some_and(|it| it.is_ok()));
        drop(rendering);
        assert!(check(messages()).await.is_some_and(|it| it.is_ok()));
    }
}
