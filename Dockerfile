# syntax=docker/dockerfile:1
# All binaries of Baton, with RDMA, for x86-64. `make image` builds it.
ARG RUST=docker.io/library/rust:1.95-slim-bookworm
ARG DEBIAN=docker.io/library/debian:bookworm-slim

FROM ${RUST} AS build
# What links libibverbs (scripts/test-rdma.sh), protoc and Google's own messages (scripts/protoc), and Python for the SBOM.
RUN apt-get update && apt-get install --yes --no-install-recommends cmake g++ libclang-dev libibverbs-dev libnl-3-dev \
  libnl-route-3-dev libprotobuf-dev make pkg-config protobuf-compiler python3 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# Names of functions stay for backtraces; lines do not.
ENV CARGO_PROFILE_RELEASE_DEBUG=false CARGO_PROFILE_RELEASE_STRIP=debuginfo
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/source/target \
  cargo build --release --locked --bins \
    --package baton-cli --package baton-conductor --package baton-prefill-node --package baton-decode-node \
    --features baton-cli/rdma,baton-prefill-node/rdma,baton-decode-node/rdma && \
  mkdir /binaries && cp target/release/baton target/release/baton-conductor target/release/baton-prefill \
    target/release/baton-decode /binaries/

FROM ${DEBIAN} AS base
# libibverbs, and what speaks to each maker's adapters.
RUN apt-get update && apt-get install --yes --no-install-recommends ibverbs-providers libibverbs1 libnl-3-200 \
  libnl-route-3-200 && rm -rf /var/lib/apt/lists/* /var/cache/apt /var/log/*
RUN dpkg-query --show --showformat '${Package} ${Version} ${Architecture}\n' >/packages

FROM build AS sbom
COPY --from=base /packages /packages
RUN python3 scripts/sbom.py --debian /packages >/sbom.cdx.json

FROM base
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title=baton org.opencontainers.image.licenses=Apache-2.0 \
  org.opencontainers.image.version=${VERSION} org.opencontainers.image.revision=${REVISION}
COPY --from=build /source/LICENSE /usr/share/doc/baton/
COPY --from=sbom /sbom.cdx.json /usr/share/doc/baton/
COPY --from=build /binaries/ /usr/local/bin/
# The chart's user. Nothing is written: the root file system may be read-only.
USER 10001:10001
CMD ["baton", "help"]
