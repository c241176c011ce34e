"""Run jobs on pools that share only the network with the submitter: send credentials, code and data to the nodes."""
