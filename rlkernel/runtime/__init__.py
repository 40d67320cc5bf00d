"""What ops and backends share of the process: autograd modes, memos, the device, workspace and stream."""
