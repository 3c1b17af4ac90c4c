"""State on disk: weights and optimizer states as safetensors files, and the manifest that makes them a checkpoint.

    run/step-200/
        server-0-5f0c….safetensors     what server 0 keeps: one tensor for each slice of a weight, a state, a master
        server-1-91ab….safetensors
        worker-0-77d2….json            what worker 0 wants to have back: its place in the data, names of parameters
        manifest.json                  names, sizes and checksums of all of these; keys and their shapes

A folder is a checkpoint if and only if its manifest is there and right: it is written last, to another name, made
durable and renamed. So whatever fails on the way (a full disk, a killed process) leaves what was there before as it
was. Files have a part of their checksum in their names: a second attempt never writes over the first.

Modules, from the bottom: `snapshot` (what the core knows of it, without files), `files` (whole or not at all), `locks`
(one job for a folder), `format` (safetensors, manifest, what workers keep), `shards` (what a server keeps, for any
number of servers), `folders` (which there are, and what is done to them), `export`.
"""
