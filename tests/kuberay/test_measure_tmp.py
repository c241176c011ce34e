import time
import pytest
from kubernetes.client.rest import RESTClientObject
from shoal.pool.api import ComputePool
from shoal.pool.backends.kuberay import quiet
from shoal.pool.backends.ray_http import RayHead
from shoal.pool.reconcile.rounds import reconcile
from shoal.state import Store

def test_measure(kube, monkeypatch):
    kube.change({"op": "add", "path": "/spec/workerGroupSpecs/0/maxReplicas", "value": 8})
    pool = ComputePool(kube.uri).up()
    pool.scale(4)
    seen = {"n": 0, "bytes": 0}
    ask, send = RESTClientObject.request, RayHead._send
    def request(self, *a, **k):
        r = ask(self, *a, **k)
        seen["n"] += 1
        seen["bytes"] += len(r.response.data if hasattr(r, "response") else r.data)
        return r
    def sent(self, *a, **k):
        r = send(self, *a, **k)
        seen["n"] += 1
        seen["bytes"] += len(r.text)
        return r
    monkeypatch.setattr(RESTClientObject, "request", request)
    monkeypatch.setattr(RayHead, "_send", sent)
    for period in (0.0, 5.0):
        monkeypatch.setattr(quiet, "PERIOD", period)
        seen.update(n=0, bytes=0)
        start = time.monotonic()
        for i in range(20):
            reconcile(Store(), pool.name)
            time.sleep(max(0, start + i + 1 - time.monotonic()))
        took = time.monotonic() - start
        print(f"MEASURED period={period}: {seen['n'] / took:.2f} requests/s, {seen['bytes'] / took / 1000:.1f} kB/s")
