{{/*
Where the model is, as JSON: kind (mock, pvc, fetch, file), path (of the file or folder in the container), name, claim,
and of what is fetched url and files, each {url, path, sha256}.
*/}}
{{- define "baton.model" -}}
{{- $model := .Values.model -}}
{{- $uri := $model.uri -}}
{{- $found := dict "kind" "mock" "name" $model.name -}}
{{- if ne .Values.engine "mock" -}}
{{- if hasPrefix "pvc://" $uri -}}
{{- $parts := splitn "/" 2 (trimPrefix "pvc://" $uri) -}}
{{- $own := $model.pvc.claim | default (printf "%s-model" (include "baton.fullname" .)) -}}
{{- $_ := set $found "kind" "pvc" -}}
{{- $_ := set $found "claim" ($parts._0 | default $own) -}}
{{- $_ := set $found "path" (printf "/model/%s" ($parts._1 | default "") | trimSuffix "/") -}}
{{- else if hasPrefix "file://" $uri -}}
{{- $_ := set $found "kind" "file" -}}
{{- $_ := set $found "path" (trimPrefix "file://" $uri) -}}
{{- else if $uri -}}
{{- $url := $uri -}}
{{- if hasPrefix "hf://" $uri -}}
{{- $parts := splitn "/" 3 (trimPrefix "hf://" $uri) -}}
{{- $named := splitn "@" 2 $parts._1 -}}
{{- $revision := $named._1 | default "main" -}}
{{- $url = printf "%s/%s/%s/resolve/%s/%s" $model.fetch.hfEndpoint $parts._0 $named._0 $revision ($parts._2 | default "") -}}
{{- end -}}
{{- $url = trimSuffix "/" $url -}}
{{- $files := list -}}
{{- if $model.files -}}
{{- range $file := $model.files -}}
{{- $files = append $files (dict "url" (printf "%s/%s" $url $file.path) "path" $file.path "sha256" ($file.sha256 | default "")) -}}
{{- end -}}
{{- $folder := $model.name | default (base $url) | replace "/" "-" -}}
{{- if and (not $model.name) (hasPrefix "hf://" $uri) -}}
{{- $folder = (splitn "@" 2 (splitn "/" 3 (trimPrefix "hf://" $uri))._1)._0 -}}
{{- end -}}
{{- $_ := set $found "path" (printf "/model/%s" $folder) -}}
{{- else -}}
{{- $file := base (first (splitList "?" $url)) -}}
{{- $files = list (dict "url" $url "path" $file "sha256" $model.sha256) -}}
{{- $_ := set $found "path" (printf "/model/%s" $file) -}}
{{- end -}}
{{- $_ := set $found "kind" "fetch" -}}
{{- $_ := set $found "files" $files -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* Arguments of a binary that say which model. */}}
{{- define "baton.modelArgs" -}}
{{- $model := include "baton.model" . | fromJson -}}
{{- if eq $model.kind "mock" -}}
- --engine=mock
{{- else -}}
- {{ printf "--model=%s" $model.path | quote }}
{{- end }}
{{- with $model.name }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- end -}}

{{- define "baton.modelMounts" -}}
{{- $model := include "baton.model" . | fromJson -}}
{{- if has $model.kind (list "pvc" "fetch") }}
- name: model
  mountPath: /model
  readOnly: true
{{- end }}
{{- end -}}

{{- define "baton.modelVolumes" -}}
{{- $model := include "baton.model" . | fromJson -}}
{{- if eq $model.kind "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $model.claim | toYaml }}
    readOnly: true
{{- else if eq $model.kind "fetch" }}
- name: model
  emptyDir:
    {{- toYaml .Values.model.fetch.emptyDir | nindent 4 }}
{{- end }}
{{- end -}}

{{/*
Fetches the model. URLs, paths and sums are arguments of the script, so that no value of theirs is read as shell. The
token is read from a file, so that it is in no list of processes. curl leaves it out if another host is redirected to.
*/}}
{{- define "baton.modelInit" -}}
{{- $model := include "baton.model" .root | fromJson -}}
{{- if eq $model.kind "fetch" }}
{{- $folder := ternary $model.path "/model" (gt (len .root.Values.model.files) 0) }}
- name: model
  image: {{ include "baton.imageName" .root.Values.model.fetch.image | toYaml }}
  imagePullPolicy: {{ .root.Values.model.fetch.image.pullPolicy }}
  command: [sh, -ec]
  args:
    - |
      fetch() {
        if [ -s /token/token ]; then printf 'header = "Authorization: Bearer %s"\n' "$(cat /token/token)"; fi |
          curl --config - --fail --location --silent --show-error --retry 10 --retry-delay 5 --retry-all-errors \
            --write-out '%{http_code}' --output "$file.part" "$@" "$url"
      }
      folder=$1
      shift
      while [ $# -gt 0 ]; do
        url=$1 file=$folder/$2 sum=$3
        shift 3
        [ ! -e "$file" ] || continue
        mkdir -p "$(dirname "$file")"
        status=0
        code=$(fetch --continue-at -) || status=$?
        # No part can be asked for there, or nothing follows what is here: from the start.
        if [ "$status" = 33 ] || [ "$code" = 416 ]; then
          rm -f "$file.part"
          status=0
          code=$(fetch) || status=$?
        fi
        [ "$status" = 0 ] || exit "$status"
        if [ -n "$sum" ] && ! echo "$sum  $file.part" | sha256sum -c -; then
          rm "$file.part"
          exit 1
        fi
        mv "$file.part" "$file"
        echo "fetched $file"
      done
    - fetch
    - {{ $folder | quote }}
    {{- range $model.files }}
    - {{ .url | quote }}
    - {{ .path | quote }}
    - {{ .sha256 | quote }}
    {{- end }}
  {{- with .root.Values.model.fetch.extraEnv }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.model.fetch.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- .securityContext | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /model
    {{- if .root.Values.model.secret.name }}
    - name: token
      mountPath: /token
      readOnly: true
    {{- end }}
{{- end }}
{{- end -}}

{{- define "baton.tokenVolume" -}}
{{- $model := include "baton.model" . | fromJson -}}
{{- if and (eq $model.kind "fetch") .Values.model.secret.name }}
- name: token
  secret:
    secretName: {{ .Values.model.secret.name | toYaml }}
    defaultMode: 288
    items:
      - {key: {{ .Values.model.secret.key | quote }}, path: token}
{{- end }}
{{- end -}}
