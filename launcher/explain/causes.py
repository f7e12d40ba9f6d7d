"""Rules for the lines that name a cause, and for lines that only look like one.

They are tried in this order, before those in signs.py: the first rule that matches a line wins.
"""

from launcher.explain.kinds import Kind, Rule, consequence

_NO_CAUSE = consequence(
    r"""
    (Deprecation|Future)Warning
    Error caught was: No module named
    Could not load dynamic library
    PreemptionMode
    can only test a child process
    forcefully exiting via
    """,
)

_EXPRESSIONS = {  # by fault
    "low-memlock": r"""
        (ibv_\w+|mlx5|IB|[Mm]emory region|reg_mr).*Cannot allocate memory
        RLIMIT_MEMLOCK|[Ll]ocked memory.*(limit|low|small)|memlock
        Unable to register memory|ibv_reg_mr\w*(\(\))? failed
        """,
    "nccl-error": r"Call to ibv_\w+ failed",
    "low-nofile": r"""
        [Tt]oo many open files
        received 0 items of ancdata
        Failed to init uv loop
        """,
    "low-nproc": r"""
        can't start new thread
        ^(?!.*(\block\b|recv|send|socket|connect)).*Resource temporarily unavailable
        """,
    "out-of-memory": r"""
        (CUDA|HIP|XPU|NPU|MPS)( backend)? out of memory|OutOfMemoryError
        CUDA (driver )?error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation
        cuda runtime error \(2\)
        would exceed allowed memory|less than desired GPU memory utilization
        No available memory for the cache blocks
        running low on memory|low on resource: memory|OOMKilled|std::bad_alloc
        CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED
        Failed to CUDA malloc|Cuda failure.* 'out of memory'
        DefaultCPUAllocator: (can't|not enough)
        failed to map segment from shared object(?!: (Operation|Permission))
        (^|[\])|:] )MemoryError|numpy.core._exceptions.*MemoryError
        Unable to allocate \S+ \w+ for an array
        [Oo]ut [Oo]f [Mm]emory.{0,20}(handler|[Kk]ill)|[Oo]ut of memory: Kill|oom[-_]kill
        [Ee]xceeded (job|step|its)? ?(virtual )?memory limit|\bp?v?mem \S+ exceeded limit
        OUT_OF_MEMORY
        Cannot allocate memory(?!.*(ibv|mr|IB))
        """,
    "small-shm": r"""
        insufficient shared memory \(shm\)
        [Bb]us error|out of shared memory
        unable to (open|write to|mmap|allocate) .*(shared memory|</torch_)
        /dev/shm/.*No space left|No space left.*(/dev/shm|shared memory)
        creating shared memory segment|Error while creating shared memory
        posix_fallocate failed
        """,
    "disk-full": r"""
        No space left on device
        [Qq]uota exceeded
        unexpected pos \d+ vs \d+
        PytorchStreamWriter failed
        basic_ios::clear: iostream error
        """,
    "checkpoint-damaged": r"""
        PytorchStreamReader failed
        EOFError: Ran out of input
        invalid load key
        HeaderToo|InvalidHeader|MetadataIncompleteBuffer|IncompleteMetadata
        Error while deserializing header
        unpickling stack underflow
        unexpected EOF, expected|storage has wrong (byte )?size|BadZipFile
        [Cc]heckpoint.*(corrupt|damaged)|not a ZIP archive|invalid magic number; corrupt file
        """,
    "ssh-refused": r"""
        Permission denied \((publickey|password|gssapi|hostbased)
        Host key verification failed
        kex_exchange_identification|ssh_exchange_identification
        REMOTE HOST IDENTIFICATION HAS CHANGED
        Permission denied, please try again
        ssh exited with exit code 255|Command 'ssh .*non-zero
        """,
    "dir-unwritable": r"""
        PermissionError
        Read-only file system
        [Pp]ermission denied
        """,
    "duplicate-node-rank": r"""
        [Dd]uplicate (node )?rank|rank \d+ .*(already (taken|in use|registered|checked in))
        already has rank|same rank
        """,
    "port-in-use": r"""
        EADDRINUSE|[Aa]ddress already in use
        [Pp]ort `?\d+`?,? (is already in use|but another process)
        """,
    "name-unresolved": r"""
        Name or service not known|Temporary failure in name resolution
        No address associated with hostname|nodename nor servname
        [Cc]ould not resolve host
        network addresses of \(\S+, \d+\) cannot be retrieved|gai error: -[23]
        """,
    "no-such-interface": r"""
        no socket interface found
        [Uu]nable to find address for
        unable to find (interface|any)[ ]
        No interface found
        """,
    "host-unreachable": r"""
        connect returned
        No route to host|EHOSTUNREACH|ENETUNREACH|Network is unreachable
        errno: 110|ETIMEDOUT|Connection timed out|connect\(\) timed out|connect.* timed out
        i/o timeout|connection timeout
        """,
    "duplicate-gpu": r"Duplicate GPU detected",
    "too-few-gpus": r"""
        invalid device ordinal
        [Nn]ot enough GPUs|requires? \d+ GPUs?.*(only|but)|You requested (gpu|GPUs?):[ ]
        machine only has:[ ]
        device < num_gpus|Invalid device id|num_gpus\w* <= torch.cuda.device_count
        No slot '\d+' specified on host
        """,
    # In the user's own module.
    "rank-error": r"""
        cannot import name '(?!.*(/(site|dist)-packages/|/lib/python3)).*\(/.*\.py\)
        attempted relative import
        """,
    "version-mismatch": r"""
        symbol \S+ version \S+ not defined
        undefined symbol
        driver .*too old
        driver version is insufficient
        GLIBC\w*_[\d.]+' not found
        NCCL version.*(mismatch|incompatib)|[Mm]ismatched? NCCL
        is not compatible with the current PyTorch installation|no kernel image is available
        CUDA version .* mismatch|detected CUDA version .*mismatches
        [Ii]nstalled CUDA version .* does not match
        compiled (with|against|using) .* CUDA .*(but|cannot)|was compiled for|ABI version
        Numpy is not available
        cannot import name '
        Error: module '\S+' has no attribute
        is required for a normal functioning of this module|VersionConflict
        unsupported toolchain|unsupported display driver|forward compatibility was attempted
        kernel image is invalid
        [Dd]river/library version mismatch|not supported in the installed CUDA driver
        Could not run '\S+' with arguments from the|operator \S+ does not exist
        """,
    "torch-without-gpu": r"""
        only supported with GPUs
        not compiled with CUDA
        Found no NVIDIA driver
        No CUDA GPUs are available|no CUDA-capable device
        without GPUs?!|requires.*CUDA.*not available
        NVIDIA driver.*not loaded|Failed to initialize NVML: Unknown
        CUDA driver initialization failed|CUDA unknown error
        couldn't communicate with the NVIDIA driver
        No supported gpu backend found
        """,
    "gpu-unhealthy": r"""
        NVRM: Xid|\bXid\b
        uncorrectable (NVLink|ECC)|ECC error
        fallen off the bus
        NVLink error|nvlink.*(fatal|error)
        Unable to determine the device handle|GPU is lost
        system not yet initialized|CUDA_ERROR_SYSTEM_NOT_READY
        device(s| s|\(s\)) (are|is/are) busy or unavailable
        """,
    "config-invalid": r"""
        error: (unrecognized arguments|the following arguments are required|argument \S+: )
        error: (ambiguous option|invalid choice)|\.py: error: |unrecognized option[ ]
        ^Error: (No such option|Got unexpected extra argument|Missing (option|argument))
        No such option: -
        are not used by the HfArgumentParser|DeepSpeed config values that mismatch
        path to an existing deepspeed config|Micro batch size per gpu
        ^(?!.*world.size).*(must|should|has to|have to|needs? to) be (evenly )?divisible by
        ^(?!.*world.size).*(must|should|has to|have to|needs? to) be (evenly )?a multiple of
        ^(?!.*world.size).*Error: .*\bis not (evenly )?divisible by
        yaml\.\w+\.(Scanner|Parser|Constructor)Error
        ConfigAttributeError|ConfigKeyError|MissingMandatoryValue|ConfigCompositionException
        omegaconf\.errors|hydra\.errors|LexerNoViableAltException|Could not override
        ValidationError
        MisconfigurationException:[ ]
        DeepSpeedConfig\w*Error|Check batch related parameters
        batch_size is not equal to micro_batch
        sbatch: error: |^srun: error: (Unable to (create|allocate)|[Ii]nvalid)
        Batch job submission failed|Requested node configuration is not available
        Invalid (distribution|specification|option)
        unexpected keyword argument '--|[Ii]nvalid value for '-
        """,
    "wrong-world": r"""
        world size of \d+ but the current world size
        [Ii]nvalid rank
        rank .* (should be|must be|not) .*(in the interval|less than|smaller) .*world
        Rank .* out of bounds
        world[_ ]size.*(mismatch|does not match|not equal|!=|is not divisible|inconsistent)
        number of tasks.*(mismatch|does not match)
        --ntasks.*(does not match|is not supported|invalid)
        requested (world|number of) .* (but|while).*(found|got)
        nnodes.*(mismatch|does not match)
        launched \d+ slurm tasks
        can't run \d+ processes on \d+ nodes
        rank should be within the
        environment variable \w+ expected, but not set
        KeyError: '(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|SLURM_\w+)'
        not enough slots|larger than total available slots
        equal to world[_ ]size|world[_ ]size.*(not equal|must be equal)
        """,
    "parameters-unused": r"Expected to have finished reduction in the prior iteration",
    "loss-not-finite": r"""
        [Ll]oss (is|was|becomes|became|diverged to) ?(nan|NaN|inf)
        \b(nan|NaN|NAN|inf) (loss|detected)|loss .*not finite|loss is (NaN|nan)
        loss scale already at minimum|[Mm]inimum loss scale reached
        FloatingPointError
        detected nan|found NaN|[Nn]on-?finite (loss|norm|grad|value|total)|DivergenceError
        is `?nan`?, stopping|returned nan values
        contains either `inf`, `nan` or element
        """,
    "cuda-error": r"""
        device-side assert|Assertion .* failed\.?$.*block|block: \[\d
        illegal (memory access|instruction was)
        CUBLAS_STATUS_(?!ALLOC)\w+
        cuDNN error|CUDNN_STATUS_(?!ALLOC)\w+
        unspecified launch failure|misaligned address|the launch timed out
        invalid configuration argument|cudaErrorLaunchFailure|cudaErrorIllegalAddress
        cudaErrorAssert
        CUDA driver error: (?!out)|cuda runtime error|CUDA_ERROR_(?!OUT_OF)|cudaError[A-Z]
        CUSOLVER_STATUS_|CUSPARSE_STATUS_|CUFFT_
        CUDA error: (?!out of memory|invalid device|no kernel|initialization|system not)
        """,
    "time-limit": r"""
        DUE TO TIME LIMIT
        walltime .*exceeded|exceeded limit .*walltime
        TERM_RUNLIMIT
        """,
    "preempted": r"DUE TO PREEMPTION|[Pp]reempt(ed|ion notice)|due to preempt|due to job requeue",
    "node-lost": r"""
        lost communication with its daemon
        DUE TO NODE FAIL|NODE[_ ]FAIL|[Nn]ode failure|^srun: error: Node failure
        [Nn]odes? \S+ (is )?not responding|host \S+ is down|DUE TO NODE FAILURE
        launch failed requeued
        """,
    "env-missing": r"""
        ModuleNotFoundError|Error: No module named|PackageNotFoundError
        (Error|^ImportError): .*cannot open shared object file
        (^|[\])|:] )ImportError
        CUDA_HOME (does not exist|environment variable is not set)|Ninja is required
        launcher '\w+' not installed|directory: '\S*(nvcc|ninja)'
        execve\(\): .*No such file|can't open file|couldn't chdir
        unable to find the specified executable
        """,
}

CAUSES = (
    _NO_CAUSE,
    *(Rule(Kind.CAUSE, fault, expressions) for fault, expressions in _EXPRESSIONS.items()),
)
