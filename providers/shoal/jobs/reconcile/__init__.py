"""Rounds that reconcile unfinished jobs: what is known of an attempt (`look`), what to do with it (`decide`), and the
acts: send it to the pool's head (`sending`), or end it (`ending`). A process that waits for a job and the clean-up of a
host call them through `rounds`."""
