"""Probes, as the kubelet makes them: from outside the pod, with their periods, thresholds and timeouts."""

import http.client
import socket
import threading

from . import spec

KINDS = ("startupProbe", "livenessProbe", "readinessProbe")
FIELDS = {"initialDelaySeconds", "periodSeconds", "timeoutSeconds", "successThreshold", "failureThreshold"}
HANDLERS = {"httpGet", "grpc", "exec", "tcpSocket"}


def http_get(address, port, path, timeout, headers=()):
    """Whether GET is answered with 200 to 399."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout)
    try:
        connection.request("GET", path, headers=dict(headers))
        return 200 <= connection.getresponse().status < 400
    finally:
        connection.close()


def frame(kind, flags, stream, body=b""):
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def grpc_health(address, port, service, timeout):
    """Whether grpc.health.v1.Health/Check answers SERVING. HTTP/2 (RFC 9113) with as little of it as one call takes."""
    data, headers, settings, end_stream, end_headers = 0, 1, 4, 1, 4
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": f"{address}:{port}",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    # HPACK: literals without indexing, of new names, not compressed (RFC 7541, 6.2.2).
    block = b"".join(b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields.items())
    message = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    call = frame(headers, end_headers, 1, block) + frame(data, end_stream, 1, b"\0" + len(message).to_bytes(4, "big") + message)
    with socket.create_connection((address, port), timeout) as connection, connection.makefile("rb") as stream:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings, 0, 0) + call)
        answer = b""
        while head := stream.read(9):
            body = stream.read(int.from_bytes(head[:3], "big"))
            kind, flags, of = head[3], head[4], int.from_bytes(head[5:9], "big")
            if kind == settings and not flags & 1:
                connection.sendall(frame(settings, 1, 0))
            if of == 1 and kind == data:
                answer += body
            if of == 1 and flags & end_stream and kind in (data, headers):
                break
    # HealthCheckResponse { status: SERVING }
    return answer[5:] == b"\x08\x01"


def ask(container, probe):
    """Whether a probe's question is answered well. Anything that goes wrong on the way is a no."""
    handlers = [name for name in HANDLERS if probe.get(name)]
    if len(handlers) != 1:
        raise spec.Unsupported(f"a probe of {handlers}: it takes one")
    what = probe[handlers[0]]
    timeout = probe.get("timeoutSeconds", 1)
    address = container.pod.address
    try:
        if "httpGet" in handlers:
            spec.only(what, {"path", "port", "httpHeaders"}, "httpGet")
            headers = [(one["name"], one["value"]) for one in what.get("httpHeaders", [])]
            return http_get(address, container.port(what["port"]), what.get("path", "/"), timeout, headers)
        if "grpc" in handlers:
            return grpc_health(address, what["port"], what.get("service", ""), timeout)
        if "exec" in handlers:
            return container.execute(what["command"], timeout).returncode == 0
        socket.create_connection((address, container.port(what["port"])), timeout).close()
        return True
    except (OSError, http.client.HTTPException, TimeoutError, container.Timeout):
        return False


class Probe(threading.Thread):
    """One probe of one start of a container."""

    def __init__(self, container, kind, probe):
        super().__init__(name=f"{container.pod.name} {kind}", daemon=True)
        spec.only(probe, FIELDS | HANDLERS, kind)
        self.container = container
        self.kind = kind
        self.probe = probe
        self.run_id = container.run_id
        self.good = 0
        self.bad = 0

    def run(self):
        self.container.ended.wait(self.probe.get("initialDelaySeconds", 0))
        while self.is_wanted():
            if self.kind == "startupProbe" or self.container.is_started:
                self.count(ask(self.container, self.probe))
                if self.kind == "startupProbe" and self.container.is_started:
                    return
                self.container.ended.wait(self.probe.get("periodSeconds", 10))
            else:
                # As the kubelet: once the container has started, it is asked at once.
                self.container.changed.wait(0.1)

    def is_wanted(self):
        if self.container.run_id != self.run_id or self.container.ended.is_set():
            return False
        # Only readiness counts once a pod is asked to end.
        return self.kind == "readinessProbe" or not self.container.pod.is_terminating

    def count(self, is_good):
        self.good, self.bad = (self.good + 1, 0) if is_good else (0, self.bad + 1)
        is_enough = self.good >= self.probe.get("successThreshold", 1)
        is_too_much = self.bad >= self.probe.get("failureThreshold", 3)
        if self.is_wanted() and (is_enough or is_too_much):
            self.container.on_probe(self.kind, is_enough)
