"""Jobs on pools whose nodes share only the network with the submitter: credentials, code and data reach them there."""
