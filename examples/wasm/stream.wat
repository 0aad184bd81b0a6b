;; Writes an answer as it is generated.
;;
;;   inferencecenter wasm run stream.wat
(module
  (import "wasi_ephemeral_nn" "load_by_name" (func $load_by_name (param i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "init_execution_context" (func $init_execution_context (param i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "set_input" (func $set_input (param i32 i32 i32) (result i32)))
  (import "wasi_ephemeral_nn" "compute_single" (func $compute_single (param i32) (result i32)))
  (import "wasi_ephemeral_nn" "get_output_single" (func $get_output_single (param i32 i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "fd_write" (func $fd_write (param i32 i32 i32 i32) (result i32)))
  (import "wasi_snapshot_preview1" "proc_exit" (func $proc_exit (param i32)))
  (memory (export "memory") 1)

  ;; 0: handle of the graph    4: handle of the context    8: bytes of a piece    12: bytes written by fd_write
  ;; 16: the tensor of the prompt: no dimensions, type u8, pointer and length of the text
  (data (i32.const 16) "\00\00\00\00" "\00\00\00\00" "\02\00\00\00" "\00\01\00\00" "\15\00\00\00")
  ;; 40: the vector for fd_write
  (data (i32.const 64) "default\n")
  (data (i32.const 256) "Tell me a short story")

  (func $check (param $errno i32)
    (if (local.get $errno) (then (call $proc_exit (local.get $errno)))))

  (func $write (param $pointer i32) (param $length i32)
    (i32.store (i32.const 40) (local.get $pointer))
    (i32.store (i32.const 44) (local.get $length))
    (drop (call $fd_write (i32.const 1) (i32.const 40) (i32.const 1) (i32.const 12))))

  (func (export "_start") (local $errno i32)
    (call $check (call $load_by_name (i32.const 64) (i32.const 7) (i32.const 0)))
    (call $check (call $init_execution_context (i32.load (i32.const 0)) (i32.const 4)))
    (call $check (call $set_input (i32.load (i32.const 4)) (i32.const 0) (i32.const 16)))
    (block $end
      (loop $next
        (local.set $errno (call $compute_single (i32.load (i32.const 4))))
        (br_if $end (i32.eq (local.get $errno) (i32.const 100)))  ;; end of sequence
        (call $check (local.get $errno))
        (call $check
          (call $get_output_single
            (i32.load (i32.const 4)) (i32.const 0) (i32.const 1024) (i32.const 4096) (i32.const 8)))
        (call $write (i32.const 1024) (i32.load (i32.const 8)))
        (br $next)))
    (call $write (i32.const 71) (i32.const 1))))
