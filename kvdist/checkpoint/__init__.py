"""State on disk: weights and optimizer states as safetensors files, and the manifest that makes them a checkpoint.

    run/step-200/
        server-0-5f0c….safetensors     data of server 0: a tensor for each slice of a weight, a state, a master
        server-1-91ab….safetensors
        worker-0-77d2….json            data of worker 0: its position in the data, names of parameters
        manifest.json                  names, sizes and checksums of these files; keys and their shapes

A folder is a checkpoint if and only if it has a valid manifest, which is written last: to another name, synced to disk
and renamed. So a failure before that (a full disk, a killed process) leaves the former checkpoint unchanged. Files have
a part of their checksum in their names: a second attempt never writes over the first.

Modules, from the bottom: `snapshot` (the core's part, without files), `files` (atomic writes), `locks` (a single job
for a folder), `format` (safetensors, manifest, data of workers), `shards` (data of a server, for any number of
servers), `folders` (list and find checkpoints, remove old ones, perform tasks), `export`.
"""
