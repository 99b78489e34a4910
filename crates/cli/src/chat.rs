//! `baton chat`.

use std::io::{IsTerminal, Write};

use baton_proto::v1;
use tokio::sync::mpsc;

use crate::answer::{Ended, answer};
use crate::args::ChatArgs;
use crate::client::Conductor;
use crate::error::CliError;
use crate::prompt::{conversation, message};
use crate::report::Report;
use crate::screen::{Paint, line};
use crate::timeline;

const HELP: &str = "/clear forgets the conversation, /timeline shows where the last answer's time went, /exit leaves (as does Ctrl-D); Ctrl-C stops an answer";

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
enum Input {
    Say(String),
    Nothing,
    Exit,
    Clear,
    Timeline,
    Help,
    Unknown(String),
}

impl Input {
    fn parse(text: &str) -> Self {
        match text.trim() {
            "" => Self::Nothing,
            "/exit" | "/quit" => Self::Exit,
            "/clear" => Self::Clear,
            "/timeline" => Self::Timeline,
            "/help" => Self::Help,
            command if command.starts_with('/') => Self::Unknown(command.to_owned()),
            said => Self::Say(said.to_owned()),
        }
    }
}

/// A conversation: lines from stdin, answers to stdout.
struct Chat<'a> {
    args: &'a ChatArgs,
    conductor: Conductor,
    messages: Vec<v1::ChatMessage>,
    last: Option<Report>,
    json: bool,
    /// Whether a person types: then an error does not end the conversation.
    interactive: bool,
}

/// Talks until `/exit` or the end of stdin.
pub async fn run(args: &ChatArgs, conductor: &str, json: bool) -> Result<(), CliError> {
    let conductor = Conductor::connect(conductor).await?;
    let interactive = std::io::stdin().is_terminal();
    let mut chat = Chat { args, conductor, messages: Vec::new(), last: None, json, interactive };
    chat.clear();
    if interactive {
        eprintln!("{}", Paint::stderr().dim(HELP));
    }
    let mut lines = stdin_lines();
    while let Some(text) = chat.next_line(&mut lines).await? {
        match Input::parse(&text) {
            Input::Exit => break,
            input => chat.on_input(input).await?,
        }
    }
    Ok(())
}

impl Chat<'_> {
    fn clear(&mut self) {
        let system = self.args.system.clone();
        self.messages = system.map(|text| message("system", text)).into_iter().collect();
    }

    /// The next line; none at the end of stdin. Ctrl-C at the prompt only says how to leave.
    async fn next_line(&self, lines: &mut mpsc::Receiver<String>) -> Result<Option<String>, CliError> {
        loop {
            if self.interactive {
                eprint!("{}", Paint::stderr().bold("> "));
                std::io::stderr().flush()?;
            }
            tokio::select! {
                text = lines.recv() => return Ok(text),
                signal = tokio::signal::ctrl_c() => { signal?; eprintln!("\n{HELP}"); }
            }
        }
    }

    async fn on_input(&mut self, input: Input) -> Result<(), CliError> {
        match input {
            Input::Say(text) => self.say(text).await?,
            Input::Clear => self.clear(),
            Input::Timeline => match &self.last {
                Some(report) => eprintln!("{}", timeline::render(report, Paint::stderr())),
                None => eprintln!("no answer has been finished yet"),
            },
            Input::Help => eprintln!("{HELP}"),
            Input::Unknown(command) => eprintln!("there is no {command}: {HELP}"),
            Input::Nothing | Input::Exit => {}
        }
        Ok(())
    }

    async fn say(&mut self, text: String) -> Result<(), CliError> {
        self.messages.push(message("user", text));
        let prompt = conversation(self.messages.clone());
        match answer(&mut self.conductor, self.args.request.request(prompt), self.json).await {
            Ok(Ended::Finished(record)) => {
                self.messages.push(message("assistant", record.text().to_owned()));
                let report = record.report();
                if self.json {
                    line(&serde_json::to_string(&report).map_err(std::io::Error::from)?)?;
                }
                self.last = Some(report);
            }
            Ok(Ended::Interrupted(record)) => {
                // What was said before the interruption stays said.
                self.messages.push(message("assistant", record.text().to_owned()));
                eprintln!("\n{}", Paint::stderr().dim("stopped"));
            }
            Err(error) => {
                self.messages.pop();
                return self.on_error(error);
            }
        }
        Ok(())
    }

    fn on_error(&self, error: CliError) -> Result<(), CliError> {
        if !self.interactive || matches!(error, CliError::Output(_)) {
            return Err(error);
        }
        if let Some(text) = error.line(self.json) {
            eprintln!("{}", Paint::stderr().red(&text));
        }
        Ok(())
    }
}

/// Lines of stdin. A thread of its own reads them: a read cannot be cancelled, and must not hold up
/// the end of the program.
fn stdin_lines() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(1);
    std::thread::spawn(move || {
        for text in std::io::stdin().lines() {
            let Ok(text) = text else { break };
            if sender.blocking_send(text).is_err() {
                break;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_line_is_a_message_or_a_command() {
        assert_eq!(Input::parse(" hello /exit "), Input::Say("hello /exit".into()));
        assert_eq!(Input::parse("  "), Input::Nothing);
        assert_eq!(
            [Input::parse("/exit"), Input::parse("/clear "), Input::parse("/timeline")],
            [Input::Exit, Input::Clear, Input::Timeline]
        );
        assert_eq!(Input::parse("/x y"), Input::Unknown("/x y".into()));
    }
}
