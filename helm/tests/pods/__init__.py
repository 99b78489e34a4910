"""Runs what the chart renders on one machine, without Kubernetes: pods are namespaces of Linux, as they are there.

| file | in Kubernetes |
|---|---|
| spec.py | what a container gets of its pod: variables, files, rights |
| images.py | images: names, and which programs of this machine they stand for |
| enter.py | the container runtime: makes the file system of a container and gives up rights |
| sandbox.py | a pod's network, on one bridge |
| probes.py, containers.py, pod.py | the kubelet: probes, restarts, ends |
| controllers.py | Deployments and StatefulSets: how many pods, and how a rollout replaces them |
| cluster.py | the rest: applies objects, writes the names of Services into /etc/hosts |
| monitoring.py | the Prometheus operator |
| load.py | clients |

A field of a workload that is neither carried out nor in `spec.LEFT_OUT` is refused, so that nothing is passed over in
silence. What differs from Kubernetes:

- Names of Services are lines in /etc/hosts, one for each pod. That of a Service with an address of its own stands for
  its ready pods, so its port is not translated: `Cluster.endpoints` gives clients the pods' ports.
- /usr of an image is this machine's, with the image's own programs in /usr/local/bin.
- A container that ended starts again after a second, and not after 10 s, 20 s, 40 s.
- Limits of resources, seccomp and NetworkPolicies are not enforced, and all pods are on one machine.
"""
