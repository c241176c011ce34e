"""The journal of pools: functions that read and change the database rows of pools, their operations, leases and
nodes."""
