{{/* What the schema cannot say: values that do not fit each other. Each message begins with the value's path. */}}
{{- define "baton.validate" -}}
{{- $v := .Values -}}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" (include "baton.fullname" .)) -}}
{{- fail (printf "fullnameOverride: not set, but no Service may be named after %s: a letter first, no dot" .Release.Name) -}}
{{- end -}}
{{- if eq $v.etcd.mode "bundled" -}}
{{- $there := lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-etcd" (include "baton.fullname" .)) -}}
{{- include "baton.sameMembers" (dict "there" (dig "spec" "replicas" 0 $there) "asked" $v.etcd.bundled.replicas) -}}
{{- end -}}
{{- if and (eq $v.engine "cpu") (not $v.model.uri) -}}
{{- fail "model.uri: not set; give pvc://CLAIM/PATH, hf://ORG/REPO/FILE, https://HOST/FILE or file:///PATH, or engine=mock" -}}
{{- end -}}
{{- if and (hasPrefix "hf://" $v.model.uri) (not $v.model.files) (not (regexMatch "^hf://[^/]+/[^/]+/.+" $v.model.uri)) -}}
{{- fail "model.files: not set, but model.uri names a folder" -}}
{{- end -}}
{{- if and $v.model.pvc.create $v.model.pvc.claim -}}
{{- fail "model.pvc.claim: names a claim that exists, but model.pvc.create makes one" -}}
{{- end -}}
{{- if and (hasPrefix "pvc:///" $v.model.uri) (not $v.model.pvc.claim) (not $v.model.pvc.create) -}}
{{- fail "model.pvc.claim: not set, but model.uri names no claim; or model.pvc.create" -}}
{{- end -}}
{{- $conductors := ternary $v.conductor.autoscaling.maxReplicas $v.conductor.replicas $v.conductor.autoscaling.enabled | int -}}
{{- if and (gt $conductors 1) (eq $v.etcd.mode "none") -}}
{{- fail "etcd.mode: none, but several conductors elect one by an etcd; or conductor.replicas=1" -}}
{{- end -}}
{{- if and (eq $v.etcd.mode "external") (not $v.etcd.external.endpoints) -}}
{{- fail "etcd.external.endpoints: not set, but etcd.mode is external" -}}
{{- end -}}
{{- if and $v.etcd.external.user (not $v.etcd.external.passwordSecret.name) -}}
{{- fail "etcd.external.passwordSecret.name: not set, but etcd.external.user is" -}}
{{- end -}}
{{- if and $v.etcd.external.passwordSecret.name (not $v.etcd.external.user) -}}
{{- fail "etcd.external.user: not set, but etcd.external.passwordSecret.name is" -}}
{{- end -}}
{{- if and $v.etcd.external.tls.secret (not $v.etcd.external.tls.enabled) -}}
{{- fail "etcd.external.tls.enabled: false, but etcd.external.tls.secret is set" -}}
{{- end -}}
{{- if and $v.etcd.external.tls.enabled (not $v.etcd.external.tls.secret) -}}
{{- fail "etcd.external.tls.secret: not set, but etcd.external.tls.enabled is" -}}
{{- end -}}
{{- if and (eq $v.etcd.mode "bundled") (gt (int $v.etcd.bundled.replicas) 1) (not $v.etcd.bundled.persistence.enabled) -}}
{{- fail "etcd.bundled.persistence.enabled: false, but a member of several that lost its data cannot come back" -}}
{{- end -}}
{{- if and $v.ingress.enabled (not $v.ingress.hosts) -}}
{{- fail "ingress.hosts: not set, but ingress.enabled is" -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs: not set, but httpRoute.enabled is" -}}
{{- end -}}
{{- if and (or $v.ingress.enabled $v.httpRoute.enabled) (not $v.services.http.enabled) -}}
{{- fail "services.http.enabled: false, but an Ingress or HTTPRoute needs it" -}}
{{- end -}}
{{- range $role := list "conductor" "prefill" "decode" -}}
{{- range $name, $block := include "baton.groups" (dict "root" $ "role" $role) | fromJson -}}
{{- $path := include "baton.path" (dict "role" $role "group" $name) -}}
{{- $ports := values $block.ports -}}
{{- if ne (len $ports) (len (uniq $ports)) -}}
{{- fail (printf "%s.ports: two are the same" $path) -}}
{{- end -}}
{{- range $block.extraArgs -}}
{{- if regexMatch "^--(grace|not-ready)-s(=|$)" . -}}
{{- fail (printf "%s.extraArgs: %s belongs into %s.settings, which the grace period is made from" $path . $path) -}}
{{- end -}}
{{- end -}}
{{- range $block.extraEnv -}}
{{- if has .name (list "BATON_GRACE_S" "BATON_NOT_READY_S") -}}
{{- fail (printf "%s.extraEnv: %s belongs into %s.settings, which the grace period is made from" $path .name $path) -}}
{{- end -}}
{{- end -}}
{{- $limit := dig "limits" "memory" "" (include "baton.resources" $block | fromYaml) -}}
{{- $cache := dig "settings" "cache_bytes" 0 $block | float64 -}}
{{- if and $limit $cache (not (dig "settings" "cache_blocks" 0 $block)) -}}
{{- if gt (addf $cache 1073741824) (include "baton.bytes" $limit | float64) -}}
{{- fail (printf "%s.settings.cache_bytes: %.0f and 1 GiB beside it are more than %s.resources.limits.memory, %s" $path $cache $path (toString $limit)) -}}
{{- end -}}
{{- end -}}
{{- if and $block.autoscaling.enabled (not $v.monitoring.prometheusAddress) -}}
{{- fail (printf "monitoring.prometheusAddress: not set, but %s.autoscaling.enabled is" $path) -}}
{{- end -}}
{{- if and $block.autoscaling.enabled (gt (int $block.autoscaling.minReplicas) (int $block.autoscaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas: more than maxReplicas" $path) -}}
{{- end -}}
{{- if and $block.hostNetwork $v.networkPolicy.enabled (not $v.networkPolicy.nodes) -}}
{{- fail (printf "networkPolicy.nodes: not set, but pods of %s.hostNetwork have their machines' addresses, which no other policy lets in" $path) -}}
{{- end -}}
{{- if and (dig "ssd" "enabled" false $block) (not (dig "ssd" "volume" dict $block)) -}}
{{- fail (printf "%s.ssd.volume: not set, but %s.ssd.enabled is" $path $path) -}}
{{- end -}}
{{- if and (eq (dig "settings" "transport" "auto" $block) "rdma") (not (dig "rdma" "enabled" false $block)) -}}
{{- fail (printf "%s.rdma.enabled: false, but %s.settings.transport is rdma" $path $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuses another number of etcd's members than there are: (dict "there" 1 "asked" 3). None, 0, at an install. */}}
{{- define "baton.sameMembers" -}}
{{- if and .there (ne (int .there) (int .asked)) -}}
{{- $message := "etcd.bundled.replicas: %d asked for, but %d are there, and their number cannot change: %s" -}}
{{- fail (printf $message (int .asked) (int .there) "back etcd up, and install a new release") -}}
{{- end -}}
{{- end -}}
