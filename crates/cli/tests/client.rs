//! The binary against a conductor that this test plays.

// Tests read the clock and wait.
#![allow(clippy::disallowed_methods)]
// The whole file is a test; clippy only knows functions that are marked as one.
#![allow(clippy::unwrap_used)]

mod fake;

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fake::Fake;
use serde_json::Value;

fn baton(fake: &Fake, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
    command.env("BATON_CONDUCTOR", fake.address()).args(args).stdin(Stdio::null());
    command
}

fn run(fake: &Fake, args: &[&str]) -> (Output, String, String) {
    let output = baton(fake, args).output().unwrap();
    let out = String::from_utf8(output.stdout.clone()).unwrap();
    let err = String::from_utf8(output.stderr.clone()).unwrap();
    (output, out, err)
}

#[test]
fn generate_streams_text_and_ends_the_line() {
    let fake = Fake::start();
    let (output, out, err) = run(&fake, &["generate", "hi"]);
    assert!(output.status.success(), "{err}");
    assert_eq!((out.as_str(), err.as_str()), ("user: hi|\n", ""));
}

#[test]
fn generate_prints_the_timeline_with_the_text() {
    let fake = Fake::start();
    let (_, out, err) = run(&fake, &["generate", "--timeline", "--raw", "hi"]);
    assert_eq!(out, "raw: hi|\n");
    assert!(
        err.contains("request        r1")
            && err.contains("finish reason: stop")
            && err.contains("over tcp to decode-0"),
        "{err}"
    );
    assert!(!err.contains('\x1b'), "no colours if stderr is no terminal");
}

#[test]
fn dash_reads_the_prompt_from_stdin() {
    let fake = Fake::start();
    for (args, said) in [
        (&["generate", "-"][..], "user: from\nstdin|\n"),
        (&["generate", "--raw", "-"], "raw: from\nstdin|\n"),
        (&["generate", "--prompt-file", "-"], "user: from\nstdin|\n"),
        (&["cache", "lookup", "-"], "17 tokens"),
    ] {
        let mut child = baton(&fake, args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"from\nstdin").unwrap();
        let out = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert!(out.contains(said), "{args:?}: {out}");
    }
    let (output, _, err) = run(&fake, &["generate", "-"]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(err, "baton: prompt: empty: at least one character is needed\n", "nothing on stdin");
}

#[test]
fn generate_prints_logprobs_as_table_after_the_text() {
    let fake = Fake::start();
    let (_, out, err) = run(&fake, &["generate", "hi", "--logprobs", "1"]);
    let expected = "user: hi|\n\nTOKEN  LOGPROB  ALTERNATIVES\n\" a\"   -0.250   \" a\" -0.250\n";
    assert_eq!((out.as_str(), err.as_str()), (expected, ""));
}

#[test]
fn empty_environment_variable_counts_as_not_set() {
    let fake = Fake::start();
    let mut command = baton(&fake, &["up", "--bin-dir", "/nowhere"]);
    for name in ["BATON_CONDUCTOR", "BATON_ENGINE", "BATON_MODEL", "BATON_GRACE_S", "BATON_TRANSPORT", "BATON_LOG"] {
        command.env(name, "");
    }
    let err = String::from_utf8(command.output().unwrap().stderr).unwrap();
    assert!(err.starts_with("baton: --model: not set"), "{err}");
}

#[test]
fn generate_with_json_flag_prints_one_object() {
    let fake = Fake::start();
    let (_, out, err) = run(&fake, &["--json", "generate", "hi", "--seed", "5"]);
    let json: Value = serde_json::from_str(out.trim_end()).unwrap_or_else(|error| panic!("{error}: {out}{err}"));
    assert_eq!((out.lines().count(), &json["text"], &json["seed"]), (1, &"user: hi|".into(), &5.into()));
    assert_eq!(json["kv_transfer"]["transport"], "tcp");
}

#[test]
fn cli_error_is_one_line_and_an_exit_status() {
    let fake = Fake::start();
    for (args, status, line) in [
        (&["generate", "fail:invalid"][..], 2, "baton: --temperature: -1, but must be at least 0\n"),
        (&["generate", "fail:overloaded"], 3, "baton: full (retry after 3 s)\n"),
        (&["generate", "fail:unavailable"], 4, "baton: no node\n"),
        (&["generate", "fail:midway"], 1, "baton: lost it (request r1)\n"),
        (
            &["generate", "--prompt-file", "/no/file"],
            2,
            "baton: --prompt-file: cannot read /no/file: No such file or directory (os error 2)\n",
        ),
        (&["generate", ""], 2, "baton: prompt: empty: at least one character is needed\n"),
    ] {
        let (output, _, err) = run(&fake, args);
        assert_eq!((output.status.code(), err.as_str()), (Some(status), line), "{args:?}");
    }
    let (_, out, err) = run(&fake, &["--json", "generate", "fail:invalid"]);
    let json: Value = serde_json::from_str(&err).unwrap();
    assert_eq!((json["error"]["kind"].as_str(), out.as_str()), (Some("invalid"), ""));
}

#[test]
fn closed_stdout_is_no_error() {
    let fake = Fake::start();
    let mut child = baton(&fake, &["generate", "slow"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stderr).as_ref()), (Some(0), ""));
}

#[test]
fn ctrl_c_aborts_the_request_and_exits_with_130() {
    let fake = Fake::start();
    let child = baton(&fake, &["generate", "endless"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    fake.wait("a request", |seen| seen.requests == 1);
    std::thread::sleep(Duration::from_millis(100));
    interrupt(child.id());
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{err}");
    assert_eq!(err, "baton: Ctrl-C: request r1 was aborted\n");
    fake.wait("the abort", |seen| seen.dropped == 1);
}

fn interrupt(pid: u32) {
    let status = Command::new("kill").args(["-INT", &pid.to_string()]).status().unwrap();
    assert!(status.success());
}

#[test]
fn chat_keeps_the_conversation_until_it_is_cleared() {
    let fake = Fake::start();
    let mut child =
        baton(&fake, &["chat", "--system", "be brief"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"one\n\n/timeline\ntwo\n/nonsense\n/clear\nthree\n/exit\nnever\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let first = "system: be brief|user: one|";
    let second = format!("{first}assistant: {first}|user: two|");
    assert_eq!(
        String::from_utf8(output.stdout).unwrap(),
        format!("{first}\n{second}\nsystem: be brief|user: three|\n")
    );
}

#[test]
fn ctrl_c_in_chat_stops_the_answer_and_not_the_conversation() {
    let fake = Fake::start();
    let mut child =
        baton(&fake, &["chat"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"endless\n").unwrap();
    fake.wait("a request", |seen| seen.requests == 1);
    std::thread::sleep(Duration::from_millis(100));
    interrupt(child.id());
    fake.wait("the abort", |seen| seen.dropped == 1);
    stdin.write_all(b"/clear\nand now\n").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), err.trim()), (Some(0), "stopped"));
    assert!(out.starts_with("more ") && out.ends_with("\nuser: and now|\n"), "{out}");
}

#[test]
fn nodes_command_lists_and_checks_nodes() {
    let fake = Fake::start();
    let (_, out, _) = run(&fake, &["nodes"]);
    assert!(out.starts_with("NAME") && out.contains("prefill-0") && out.contains("ready"), "{out}");
    let (_, out, _) = run(&fake, &["nodes", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json[0]["name"], "prefill-0");
    let (_, out, _) = run(&fake, &["nodes", "--transport"]);
    assert!(out.starts_with("FROM") && out.contains("prefill-0") && out.contains("shm"), "{out}");
    let (_, out, _) = run(&fake, &["nodes", "--transport", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((json.as_array().unwrap().len(), &json[0]["to"]), (1, &"decode-0".into()));
    let (output, out, err) = run(&fake, &["nodes", "--check"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        (out.as_str(), err.as_str()),
        ("prefill-0: ok\ndecode-0: block 3 is lost\n", "baton: decode-0: block 3 is lost\n")
    );
}

#[test]
fn load_command_shows_load_once_or_repeatedly() {
    let fake = Fake::start();
    let (output, out, err) = run(&fake, &["load"]);
    assert!(output.status.success(), "{err}");
    assert!(out.starts_with("PREFILL") && out.contains("prefill-0") && out.contains("QUANTITY"), "{out}");
    let (_, out, _) = run(&fake, &["load", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((out.lines().count(), &json["prefill"][0]["pending"]), (1, &3.into()));
    let mut child = baton(&fake, &["load", "--json", "--watch", "0.1"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    for _ in 0..3 {
        let json: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert_eq!(json["prefill"][0]["node"], "prefill-0");
    }
    interrupt(child.id());
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn settings_command_shows_and_sets_settings() {
    let fake = Fake::start();
    let (output, out, err) = run(&fake, &["settings", "get"]);
    assert!(output.status.success(), "{err}");
    assert!(out.contains("log      debug  set at run time") && out.contains("version 1, set by me"), "{out}");
    let (_, out, _) = run(&fake, &["settings", "get", "log", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap()["settings"]["log"]["value"], "debug");
    let (output, _, err) = run(&fake, &["settings", "get", "loud"]);
    assert_eq!(
        (output.status.code(), err.as_str()),
        (Some(2), "baton: loud: not among those that change at run time: log\n")
    );
    let (output, out, _) = run(&fake, &["settings", "set", "log=debug"]);
    assert_eq!((output.status.code(), out.as_str()), (Some(0), "version 1 is in force at 1 of 1 conductors\n"));
    let (output, _, err) = run(&fake, &["settings", "set", "log=loud"]);
    assert_eq!((output.status.code(), err.as_str()), (Some(2), "baton: log: 'loud', but must be a level\n"));
    let (output, _, err) = run(&fake, &["settings", "set", "log=debug", "--by", "late"]);
    assert!(output.status.code() == Some(1) && err.contains("version 2 is set, but not in force yet at"), "{err}");
    let (output, _, err) = run(&fake, &["settings", "set", "log"]);
    assert!(output.status.code() == Some(2) && err.contains("expected KEY=VALUE"), "{err}");
}

#[test]
fn explain_command_explains_a_request_by_its_id() {
    let fake = Fake::start();
    let known = "a".repeat(32);
    let unknown = "b".repeat(32);
    let (_, out, _) = run(&fake, &["explain", &known]);
    assert_eq!(out, format!("request   {known}\n\nit runs\n"));
    let (_, out, _) = run(&fake, &["explain", "cmpl-AAAAAA"]);
    assert_eq!(out, "request   aaaaaa\n\nit runs\n", "its first digits");
    let (_, out, _) = run(&fake, &["explain", &known, "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["max_tokens"], json["end"].is_null()), (&5.into(), true));
    let (output, _, err) = run(&fake, &["explain", &unknown]);
    assert_eq!(
        (output.status.code(), err.as_str()),
        (Some(2), "baton: request_id: not among the last 7 (if it is a prompt, give it on stdin: baton explain -)\n")
    );
}

#[test]
fn explain_command_asks_each_conductor_for_a_request() {
    let [first, other] = ['a', 'b'].map(Fake::knowing);
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let all = format!("{},{gone},{}", first.address(), other.address());
    let explain = |digit: &str| run(&first, &["--conductor", &all, "explain", &digit.repeat(32)]);
    assert_eq!(explain("a").1, format!("request   {}\n\nit runs\n", "a".repeat(32)));
    assert_eq!(explain("b").1, format!("request   {}\n\nit runs\n", "b".repeat(32)));
    let (output, _, err) = explain("c");
    assert!(output.status.code() == Some(4) && err.contains(&gone.to_string()), "it may have it: {err}");
    let both = format!("{},{}", first.address(), other.address());
    let (output, _, err) = run(&first, &["--conductor", &both, "explain", &"c".repeat(32)]);
    assert!(output.status.code() == Some(2) && err.contains(&both.replace(',', ", ")), "{err}");
    let twin = Fake::knowing('a');
    let twins = format!("{},{}", first.address(), twin.address());
    let (output, _, err) = run(&first, &["--conductor", &twins, "explain", "aaaaaa"]);
    assert!(output.status.code() == Some(2) && err.contains(&twin.address()), "each may be meant: {err}");
}

#[test]
fn cache_command_shows_looks_up_and_clears() {
    let fake = Fake::start();
    let (_, out, err) = run(&fake, &["cache", "--top", "7"]);
    assert!(out.starts_with("NODE") && out.contains("prefill-0") && out.contains("PREFIX"), "{out}{err}");
    let (_, out, _) = run(&fake, &["cache", "--top", "7", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["prefixes"][0]["tokens"], &json["nodes"][0]["hit_rate"]), (&7.into(), &Value::Null));
    let (_, out, _) = run(&fake, &["cache", "lookup", "--raw", "hi", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["prompt_tokens"], &json["matches"][0]["node"]), (&8.into(), &"decode-0".into()), "raw: hi|");
    let (_, out, _) = run(&fake, &["cache", "clear"]);
    let held = "blocks that requests hold stay until they end: 7 of decode-0";
    assert_eq!(out, format!("told to clear: prefill-0, decode-0\n{held}\n"));
    let (output, out, err) = run(&fake, &["cache", "clear", "x"]);
    assert_eq!((output.status.code(), out.as_str(), err.as_str()), (Some(2), "", "baton: node: no node 'x'\n"));
}

#[test]
fn version_of_unreachable_conductors_fails_only_if_they_were_given() {
    let at = |args: &[&str], variable: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        command.env_remove("BATON_CONDUCTOR").args(args).stdin(Stdio::null());
        variable.map(|address| command.env("BATON_CONDUCTOR", address));
        let output = command.output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (status, out, err) = at(&["--conductor", "127.0.0.1:1", "version"], None);
    assert_eq!(status, Some(4), "{err}");
    assert!(out.starts_with("baton ") && err.starts_with("baton: no conductor answers at 127.0.0.1:1: "), "{out}{err}");
    assert_eq!(at(&["version", "--json"], Some("127.0.0.1:1")).0, Some(4));
}

#[test]
fn wrong_flag_is_a_json_error_under_json() {
    let fake = Fake::start();
    for (args, said) in [
        (&["--json", "generate", "hi", "--nope"][..], "unexpected argument '--nope' found"),
        (&["nodes", "--watch", "x", "--json"], "invalid value 'x' for '--watch"),
        (&["--json", "nope"], "unrecognized subcommand 'nope'"),
        (&["--json"], "'baton' requires a subcommand"),
        (&["--json", "up", "--conductor", "h:1"], "invalid value 'h:1' for '--conductor <ADDR>': this command asks"),
    ] {
        let (output, out, err) = run(&fake, args);
        let json: Value = serde_json::from_str(&err).unwrap_or_else(|error| panic!("{args:?}: {error}: {err}"));
        assert_eq!((output.status.code(), out.as_str(), err.lines().count()), (Some(2), "", 1), "{args:?}");
        let message = json["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(said) && !message.contains("Usage"), "{args:?}: {message}");
        assert_eq!(json["error"]["kind"], "invalid");
    }
    let (output, out, _) = run(&fake, &["--json", "--version"]);
    assert!(output.status.success() && out.starts_with("baton "), "{out}");
}

#[test]
fn several_completions_are_printed_one_after_the_other() {
    let fake = Fake::start();
    let (_, out, err) = run(&fake, &["generate", "hi", "--n", "2"]);
    assert_eq!((out.as_str(), err.as_str()), ("== 1 of 2 ==\nuser: hi|\n\n== 2 of 2 ==\nuser: hi|\n", ""));
    let (_, out, _) = run(&fake, &["generate", "hi", "--n", "2", "--json"]);
    let json: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((json[0]["text"].as_str(), json[1]["text"].as_str()), (Some("user: hi|"), Some("user: hi|")));
}

#[test]
fn version_command_shows_each_conductor_and_the_leader() {
    let fake = Fake::start();
    let both = format!("{},127.0.0.1:1", fake.address());
    let (_, out, _) = run(&fake, &["version", "--conductor", &both]);
    let line = |has: &str| out.lines().find(|line| line.contains(has)).unwrap_or_default().to_owned();
    assert!(line("9.9.9").split_whitespace().skip(1).eq(["c1", "9.9.9", "1", "yes", "no"]), "{out}");
    assert!(line("127.0.0.1:1 ").contains("not reachable: ") && out.starts_with("baton "), "{out}");
    let output = baton(&fake, &["version", "--json", "--conductor", &both]).output().unwrap();
    assert!(output.status.success());
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&json["conductors"][0]["leads"], &json["conductors"][0]["id"]), (&true.into(), &"c1".into()));
    assert!(json["conductors"][1]["error"].is_string() && json["version"].is_string());
    let before = Instant::now();
    let output = baton(&fake, &["nodes", "--conductor", "127.0.0.1:1"]).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(before.elapsed() < Duration::from_secs(5));
}
