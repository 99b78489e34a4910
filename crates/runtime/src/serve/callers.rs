//! Who may call a port from a browser. A browser sends what any web page asks it to send, also to
//! this machine's own ports, and says in `Origin` which page that is. A page whose name has come to
//! mean this machine (DNS rebinding) says its own name in `Host`.

use std::net::{IpAddr, SocketAddr};

use http::uri::Authority;
use http::{HeaderMap, Request, header};

use crate::settings::BadSetting;

const KEY: &str = "cors_origins";
/// So much of a header is repeated.
const SHOWN_CHARS: usize = 64;

/// Web pages that may call, by their origins.
#[derive(Debug, Clone, Default)]
pub struct Origins {
    /// `*`: all, under any name of this machine.
    all: bool,
    /// In lower case, as browsers write them.
    named: Vec<String>,
}

impl Origins {
    /// `https://host`, `https://host:port`, or `*` alone.
    ///
    /// # Errors
    /// One of them is no origin.
    pub fn parse(origins: &[String]) -> Result<Self, BadSetting> {
        if origins == ["*"] {
            return Ok(Self { all: true, named: Vec::new() });
        }
        let named = origins.iter().map(|text| origin(text)).collect::<Result<_, _>>()?;
        Ok(Self { all: false, named })
    }

    /// Whether every page may call.
    pub const fn are_all(&self) -> bool {
        self.all
    }

    /// Those that were named.
    pub fn named(&self) -> &[String] {
        &self.named
    }

    fn allows(&self, origin: &str) -> bool {
        self.all || self.named.iter().any(|named| named == origin)
    }

    /// Whether it is the host of one of them: a proxy serves such a page, and passes the name on.
    fn names_host(&self, host: &str) -> bool {
        let hosts = self.named.iter().filter_map(|origin| Some(origin.split_once("://")?.1));
        self.all || hosts.filter_map(|host| host.parse::<Authority>().ok()).any(|named| named.host() == host)
    }
}

fn origin(text: &str) -> Result<String, BadSetting> {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    let is_host = |host: &str| host.parse::<Authority>().is_ok_and(|host| !host.as_str().contains(['@', '*']));
    if host.is_some_and(is_host) {
        return Ok(text.to_ascii_lowercase());
    }
    let problem = format!("'{text}' is no origin (expected https://host, https://host:port, or * alone)");
    Err(BadSetting::invalid(KEY, problem))
}

/// Who may call one port.
#[derive(Debug, Clone)]
pub struct Callers {
    /// `None`: no page may, whatever is set.
    origins: Option<Origins>,
    /// It listens on loopback, where requests name loopback.
    is_loopback: bool,
}

impl Callers {
    /// Those of a port that listens here, web pages among them.
    pub fn at(address: SocketAddr, origins: Origins) -> Self {
        Self { origins: Some(origins), ..Self::without_pages(address) }
    }

    /// Those of a port that no web page may call.
    pub fn without_pages(address: SocketAddr) -> Self {
        Self { origins: None, is_loopback: address.ip().to_canonical().is_loopback() }
    }

    /// Whether the request may be served.
    ///
    /// # Errors
    /// Why not, and what would allow it.
    pub fn check<B>(&self, request: &Request<B>) -> Result<(), String> {
        let headers = request.headers();
        let allows = |origin: &str| self.origins.as_ref().is_some_and(|origins| origins.allows(origin));
        if let Some(origin) = values(headers, header::ORIGIN).find(|origin| !allows(origin)) {
            return Err(self.no_page(shown(origin)));
        }
        if !self.is_loopback {
            return Ok(());
        }
        let target = request.uri().authority().map(Authority::as_str);
        let mut hosts = values(headers, header::HOST).chain(target);
        hosts.find(|host| !self.takes(host)).map_or(Ok(()), |host| Err(self.no_host(shown(host))))
    }

    fn no_page(&self, origin: &str) -> String {
        let allowed = match self.origins {
            Some(_) => "--cors-origins names the web pages that may",
            None => "no web page may call this port",
        };
        format!("origin: '{origin}' may not call; {allowed}")
    }

    fn no_host(&self, host: &str) -> String {
        let or_named = match self.origins {
            Some(_) => ", or name the host in --cors-origins, as in https://name",
            None => "",
        };
        format!("host: '{host}', but this port listens on loopback: call it localhost or 127.0.0.1{or_named}")
    }

    fn takes(&self, host: &str) -> bool {
        let Ok(authority) = host.to_ascii_lowercase().parse::<Authority>() else { return false };
        let name = authority.host();
        let is_named = self.origins.as_ref().is_some_and(|origins| origins.names_host(name));
        !authority.as_str().contains('@') && (is_named || is_loopback(name))
    }
}

/// Names that mean loopback everywhere (RFC 6761, section 6.3), and its addresses.
fn is_loopback(host: &str) -> bool {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = address.parse::<IpAddr>() {
        return address.to_canonical().is_loopback();
    }
    let name = host.strip_suffix('.').unwrap_or(host);
    name == "localhost" || name.ends_with(".localhost")
}

/// A header's values. One that is no text is as wrong as any other.
fn values(headers: &HeaderMap, name: header::HeaderName) -> impl Iterator<Item = &str> {
    headers.get_all(name).into_iter().map(|value| value.to_str().unwrap_or("?"))
}

fn shown(text: &str) -> &str {
    text.char_indices().nth(SHOWN_CHARS).map_or(text, |(end, _)| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn callers(address: &str, origins: &[&str]) -> Callers {
        let origins = origins.iter().map(ToString::to_string).collect::<Vec<_>>();
        Callers::at(address.parse().unwrap(), Origins::parse(&origins).unwrap())
    }

    fn refused(callers: &Callers, uri: &str, headers: &[(&str, &str)]) -> Option<String> {
        let request = headers.iter().fold(Request::get(uri), |request, (name, value)| request.header(*name, *value));
        callers.check(&request.body(()).unwrap()).err()
    }

    #[test]
    fn web_page_may_call_only_if_it_is_named() {
        let named = callers("10.0.0.1:1", &["https://A.example", "http://b:8080"]);
        let asks = |origin: &str| refused(&named, "/", &[("origin", origin)]);
        assert_eq!((asks("https://a.example"), asks("http://b:8080")), (None, None));
        for wrong in ["https://evil.example", "null", "", "http://a.example", "https://a.example:444", "http://b"] {
            let told = asks(wrong).unwrap();
            assert!(told.starts_with(&format!("origin: '{wrong}'")) && told.contains("--cors-origins"), "{told}");
        }
        let two = [("origin", "https://a.example"), ("origin", "https://evil.example")];
        assert!(refused(&named, "/", &two).is_some());
        let own = [("origin", "http://10.0.0.1:1"), ("host", "10.0.0.1:1")];
        assert!(refused(&named, "/", &own).is_some(), "what is rebound to this machine looks so, too");
        assert!(asks(&"x".repeat(5000)).unwrap().len() < 200);
        assert_eq!(refused(&callers("10.0.0.1:1", &["*"]), "/", &[("origin", "null")]), None);
    }

    #[test]
    fn loopback_port_takes_loopback_names_and_those_of_named_pages() {
        let asks = |callers: &Callers, host: &str| refused(callers, "/", &[("host", host)]);
        for listen in ["127.0.0.1:1", "127.0.0.2:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            let port = callers(listen, &["https://llm.example"]);
            for right in ["localhost", "LOCALHOST:8080", "a.localhost", "localhost.", "127.0.0.1:80", "127.9.9.9"] {
                assert_eq!(asks(&port, right), None, "{right}");
            }
            for right in ["[::1]", "[::1]:80", "[::ffff:127.0.0.1]", "llm.example", "LLM.example:8080"] {
                assert_eq!(asks(&port, right), None, "{right}");
            }
            for wrong in ["evil.example", "localhost.evil.example", "evillocalhost", "127.0.0.1.evil.example", ""] {
                let told = asks(&port, wrong).unwrap();
                assert!(told.starts_with(&format!("host: '{wrong}', but this port listens on loopback")), "{told}");
            }
            for wrong in ["localhost@evil.example", "evil@localhost", "10.0.0.1", "0.0.0.0", "127.1", "a.llm.example"] {
                assert!(asks(&port, wrong).is_some(), "{wrong}");
            }
            let two = [("host", "localhost"), ("host", "evil.example")];
            assert!(refused(&port, "/", &two).is_some());
            assert!(
                refused(&port, "http://evil.example/", &[("host", "localhost")]).is_some(),
                "the target goes first"
            );
            assert_eq!(refused(&port, "/", &[]), None, "a browser always names the host");
        }
        assert_eq!(asks(&callers("127.0.0.1:1", &["*"]), "evil.example"), None);
        assert_eq!(asks(&callers("10.0.0.1:1", &[]), "llm.example"), None, "a proxy's own name");
        assert_eq!(asks(&callers("0.0.0.0:1", &[]), "llm.example"), None);
    }

    #[test]
    fn port_without_pages_names_no_setting() {
        let port = Callers::without_pages("127.0.0.1:1".parse().unwrap());
        let told = refused(&port, "/", &[("origin", "https://a.example")]).unwrap();
        assert_eq!(told, "origin: 'https://a.example' may not call; no web page may call this port");
        let told = refused(&port, "/", &[("host", "a.example")]).unwrap();
        assert!(told.ends_with("call it localhost or 127.0.0.1"), "{told}");
        assert_eq!(refused(&port, "/", &[("host", "localhost:9090")]), None);
    }

    #[test]
    fn origin_has_a_scheme_and_a_host_and_no_path() {
        let parse = |text: &str| Origins::parse(&[text.to_owned()]);
        for right in ["*", "https://a.example", "http://localhost:3000", "http://[::1]:3000"] {
            assert!(parse(right).is_ok(), "{right}");
        }
        for wrong in ["a.example", "https://", "https://a/", "https://*.a", "ftp://a", "https://a b", "https://u@a"] {
            assert!(parse(wrong).unwrap_err().problem.contains(wrong), "{wrong}");
        }
        assert!(Origins::parse(&["https://a".to_owned(), "*".to_owned()]).is_err());
    }
}
