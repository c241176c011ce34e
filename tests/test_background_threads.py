from __future__ import annotations

from threading import Event

from shoal import background_threads
from shoal.background_threads import BackgroundThread


def test_the_end_of_the_interpreter_stops_threads_and_waits_for_a_limited_time(monkeypatch, caplog):
    monkeypatch.setattr(background_threads, "_END_S", 0.0)
    stopped, released = Event(), Event()
    threads = [
        BackgroundThread(stopped.wait, name="stops", stop=stopped.set),
        BackgroundThread(released.wait, name="hangs"),
    ]
    for thread in threads:
        thread.start()

    background_threads._end_threads()

    assert stopped.is_set()
    assert "its thread hangs has ended: its last changes may be lost" in caplog.text
    released.set()
    for thread in threads:
        thread.join()
