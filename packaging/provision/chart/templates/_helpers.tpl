{{- define "slurmlet.labels" -}}
app.kubernetes.io/name: slurmlet-provision
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}
{{- define "slurmlet.selector" -}}
app.kubernetes.io/name: slurmlet-provision
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
{{- define "slurmlet.host" -}}
slurmlet-provision.{{ .Release.Namespace }}.svc
{{- end }}
{{- define "slurmlet.certManager" -}}
{{- if eq .Values.certificates.mode "cert-manager" }}true{{ else if ne .Values.certificates.mode "self" }}
{{- fail "certificates.mode must be self or cert-manager" }}{{ end }}
{{- end }}
